"""The named ViT variants.

- ``vit_{tiny,small,base,large}_patch{8,14,16,32}``: the sizes of the papers of ViT and DeiT (arXiv:2010.11929,
  2012.12877), 224 pixels.
- ``vit_{small,base,large}_patch14[_reg4]_dinov2``: DINOv2 backbones (arXiv:2304.07193, 2309.16588), 518 pixels.
- ``vit_nano_*``: small siblings that train on a CPU in seconds, for tests and demos.

Every argument of :class:`~dpzoo.models.vit.ViT` can be overridden, as in
``create_model("vit_small_patch16", img_size=(64, 128))``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dpzoo.models.registry import register_model
from dpzoo.models.vit import ViT

SIZES: dict[str, dict[str, int]] = {
    "tiny": {"embed_dim": 192, "depth": 12, "num_heads": 3},
    "small": {"embed_dim": 384, "depth": 12, "num_heads": 6},
    "base": {"embed_dim": 768, "depth": 12, "num_heads": 12},
    "large": {"embed_dim": 1024, "depth": 24, "num_heads": 16},
}
PATCHES = (8, 14, 16, 32)
NANO: dict[str, Any] = {"embed_dim": 64, "depth": 4, "num_heads": 4, "img_size": 32, "num_classes": 10}
DINOV2: dict[str, Any] = {"patch_size": 14, "img_size": 518, "init_values": 1e-5, "num_classes": 0}
REGISTERS: dict[str, Any] = {"reg_tokens": 4, "no_embed_class": True}
DENSE: dict[str, Any] = {"num_classes": 0, "head": "dense"}
VOLUME: dict[str, Any] = {"img_size": 16, "ndim": 3, "in_chans": 1}
TINY: dict[str, Any] = {"embed_dim": 24, "depth": 1, "num_heads": 3, "num_classes": 5}


def _register(name: str, variant: Mapping[str, Any]) -> None:
    def build(**kwargs: Any) -> ViT:
        return ViT(**{**variant, **kwargs})

    build.__name__ = build.__qualname__ = name
    build.__doc__ = f"ViT({', '.join(f'{k}={v!r}' for k, v in variant.items())})"
    ndim, patch = variant.get("ndim", 2), variant["patch_size"]
    grid = {"img_size": tuple(patch * n for n in (3, 2, 2)[:ndim])}
    classes = {"num_classes": 0} if variant.get("num_classes") == 0 else {}
    register_model(tiny={**TINY, **grid, **classes})(build)


for _size, _dims in SIZES.items():
    for _patch in PATCHES:
        _register(f"vit_{_size}_patch{_patch}", {"patch_size": _patch, **_dims})
    if _size != "tiny":
        _register(f"vit_{_size}_patch14_dinov2", {**_dims, **DINOV2})
        _register(f"vit_{_size}_patch14_reg4_dinov2", {**_dims, **DINOV2, **REGISTERS})

for _patch in (2, 4, 8):
    _register(f"vit_nano_patch{_patch}", {**NANO, "patch_size": _patch})
_register("vit_nano_patch4_gap", {**NANO, "patch_size": 4, "class_token": False, "global_pool": "avg"})
_register("vit_nano_patch4_dense", {**NANO, "patch_size": 4, **DENSE})
_register("vit_nano_patch4_3d", {**NANO, "patch_size": 4, **VOLUME})
_register("vit_nano_patch4_3d_dense", {**NANO, "patch_size": 4, **VOLUME, **DENSE})
