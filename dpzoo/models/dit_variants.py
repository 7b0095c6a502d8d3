"""The named DiT variants.

- ``dit_{small,base,large,xlarge}_patch{2,4,8}``: the paper's sizes (arXiv:2212.09748), on latents of 32 x 32 with 4
  channels and 1000 classes; mean and variance are predicted (8 channels).
- ``dit_stormscope``: the size of StormScope (arXiv:2601.17268) on a grid of 1024 x 1792: neighborhood attention with a
  window of 31, a learned position for each of 256 x 448 patches, conditions as a field.
- ``dit_nano_*``: small siblings that train on a CPU in seconds, one for each option, for tests and demos.

Every argument of :class:`~dpzoo.models.dit.DiT` can be overridden, as in
``create_model("dit_small_patch4", img_size=(64, 128), in_chans=5, condition="vector", condition_size=3)``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dpzoo.models.dit import DiT
from dpzoo.models.registry import register_model

SIZES: dict[str, dict[str, int]] = {
    "small": {"embed_dim": 384, "depth": 12, "num_heads": 6},
    "base": {"embed_dim": 768, "depth": 12, "num_heads": 12},
    "large": {"embed_dim": 1024, "depth": 24, "num_heads": 16},
    "xlarge": {"embed_dim": 1152, "depth": 28, "num_heads": 16},
}
PATCHES = (2, 4, 8)
IMAGENET: dict[str, Any] = {"out_chans": 8, "condition": "class", "condition_size": 1000, "condition_drop": 0.1}
STORMSCOPE: dict[str, Any] = {
    "img_size": (1024, 1792),
    "patch_size": 4,
    "in_chans": 8,
    "field_chans": 47,
    "embed_dim": 768,
    "depth": 16,
    "num_heads": 16,
    "kernel_size": 31,
    "pos_embed": "learned",
    "time_freq_dim": 768,
    "time_hidden_dim": 1536,
}
NANO: dict[str, Any] = {"img_size": 32, "patch_size": 4, "in_chans": 2, "embed_dim": 64, "depth": 4, "num_heads": 4}
NANO_OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "_class": {"condition": "class", "condition_size": 10, "condition_drop": 0.1},
    "_scalar": {"condition": "scalar", "condition_size": 2},
    "_field": {"field_chans": 3, "mask_token": True, "condition": "vector", "condition_size": 5},
    "_rotary": {"pos_embed": "rotary", "qk_norm": True, "time": False},
    "_neighborhood": {"kernel_size": 5, "pos_embed": "learned"},
    "_neighborhood_rotary": {"kernel_size": 5, "pos_embed": "rotary", "field_chans": 1, "mask_token": True},
    "_3d": {"img_size": 16, "ndim": 3},
    "_3d_neighborhood": {"img_size": 16, "ndim": 3, "kernel_size": 3, "pos_embed": "rotary", "rope_interleaved": False},
}
TINY: dict[str, Any] = {"embed_dim": 24, "depth": 1, "num_heads": 2, "time_freq_dim": 8, "time_hidden_dim": 16}


def _register(name: str, *parts: Mapping[str, Any]) -> None:
    variant = {key: value for part in parts for key, value in part.items()}

    def build(**kwargs: Any) -> DiT:
        return DiT(**{**variant, **kwargs})

    build.__name__ = build.__qualname__ = name
    build.__doc__ = f"DiT({', '.join(f'{k}={v!r}' for k, v in variant.items())})"
    register_model(tiny=_tiny(variant))(build)


def _tiny(variant: Mapping[str, Any]) -> dict[str, Any]:
    """Few patches, but more of them than a window has."""
    patches = (6, 4, 4) if "kernel_size" in variant else (5, 2, 3)
    tiny = {**TINY, "img_size": tuple(variant["patch_size"] * n for n in patches[: variant.get("ndim", 2)])}
    if "kernel_size" in variant:
        tiny["kernel_size"] = 3
    if variant.get("condition") == "class":
        tiny["condition_size"] = 7
    return tiny


for _size, _dims in SIZES.items():
    for _patch in PATCHES:
        _register(f"dit_{_size}_patch{_patch}", {"patch_size": _patch}, _dims, IMAGENET)
_register("dit_stormscope", STORMSCOPE)
for _option, _changes in NANO_OPTIONS.items():
    _register(f"dit_nano_patch4{_option}", NANO, _changes)
