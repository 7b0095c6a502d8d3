"""The named neighborhood attention transformers.

- ``nat_{mini,tiny,small,base}``: NAT (arXiv:2204.07143), kernel 7, 224 pixels.
- ``dinat_{mini,tiny,small,base,large}``: DiNAT (arXiv:2209.15001), every second block dilated as far as the grid of a
  224-pixel picture lets a window of 7 reach.
- ``dinat_large_384``, ``dinat_large_384_kernel11``: the large DiNAT on 384 pixels.
- ``nat_nano*``, ``dinat_nano*``: small siblings that train on a CPU in seconds, also dense (a field in, a field out)
  and 3-D.

Every argument of :class:`~dpzoo.models.neighborhood.NeighborhoodTransformer` can be overridden, as in
``create_model("dinat_tiny", in_chans=20, head="dense")``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dpzoo.models.neighborhood import NeighborhoodTransformer
from dpzoo.models.registry import register_model

DEEP: dict[str, Any] = {"depths": (3, 4, 18, 5)}
SIZES: dict[str, dict[str, Any]] = {
    "mini": {"depths": (3, 4, 6, 5), "embed_dim": 64, "num_heads": (2, 4, 8, 16), "drop_path_rate": 0.2},
    "tiny": {**DEEP, "embed_dim": 64, "num_heads": (2, 4, 8, 16), "drop_path_rate": 0.2},
    "small": {**DEEP, "embed_dim": 96, "num_heads": (3, 6, 12, 24), "drop_path_rate": 0.3, "mlp_ratio": 2.0},
    "base": {
        **DEEP,
        "embed_dim": 128,
        "num_heads": (4, 8, 16, 32),
        "drop_path_rate": 0.5,
        "mlp_ratio": 2.0,
        "layer_scale": 1e-5,
    },
    "large": {**DEEP, "embed_dim": 192, "num_heads": (6, 12, 24, 48), "drop_path_rate": 0.35, "mlp_ratio": 2.0},
}
DILATED: dict[str, Any] = {"dilations": (8, 4, 2, 1)}
NANO: dict[str, Any] = {
    "embed_dim": 32,
    "depths": (2, 2),
    "num_heads": (2, 4),
    "kernel_size": 5,
    "img_size": 32,
    "num_classes": 10,
}
NANO_DILATED: dict[str, Any] = {"kernel_size": 3, "dilations": (2, 1)}
DENSE: dict[str, Any] = {"num_classes": 0, "head": "dense"}
VOLUME: dict[str, Any] = {"ndim": 3, "in_chans": 1, "img_size": 16, "kernel_size": 3, "dilations": None}
TINY: dict[str, Any] = {
    "embed_dim": 8,
    "depths": (2, 1),
    "num_heads": (1, 2),
    "kernel_size": 3,
    "num_classes": 5,
    "drop_path_rate": 0.0,
}


def _register(name: str, *parts: Mapping[str, Any]) -> None:
    variant = {key: value for part in parts for key, value in part.items()}

    def build(**kwargs: Any) -> NeighborhoodTransformer:
        return NeighborhoodTransformer(**{**variant, **kwargs})

    build.__name__ = build.__qualname__ = name
    build.__doc__ = f"NeighborhoodTransformer({', '.join(f'{k}={v!r}' for k, v in variant.items())})"
    dilated = {"dilations": (2, 1)} if variant.get("dilations") else {}
    size = {"img_size": (21, 8, 9) if variant.get("ndim") == 3 else (37, 18)}
    register_model(tiny={**TINY, **dilated, **size, **({"num_classes": 0} if "head" in variant else {})})(build)


for _size, _variant in SIZES.items():
    if _size != "large":
        _register(f"nat_{_size}", _variant, {"layer_scale": 1e-5} if _size == "small" else {})
    _register(f"dinat_{_size}", _variant, DILATED)
_register("dinat_large_384", SIZES["large"], {"img_size": 384, "dilations": (13, 6, 3, 1)})
_register("dinat_large_384_kernel11", SIZES["large"], {"img_size": 384, "kernel_size": 11, "dilations": (8, 4, 2, 1)})
for _family, _nano in {"nat": NANO, "dinat": {**NANO, **NANO_DILATED}}.items():
    _register(f"{_family}_nano", _nano)
    _register(f"{_family}_nano_dense", _nano, DENSE)
_register("nat_nano_3d", NANO, VOLUME)
_register("nat_nano_3d_dense", NANO, VOLUME, DENSE)
