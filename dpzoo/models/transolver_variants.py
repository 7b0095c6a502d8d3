"""The named Transolver variants.

- ``transolver_{darcy,navier_stokes,elasticity,plasticity,airfoil,pipe}``: the PDE benchmarks of the paper
  (arXiv:2402.02366), ``transolver_shapenet_car`` its design task.
- ``transolver_plus_aircraft``: Transolver++ (arXiv:2502.02414).
- ``transolver_drivaer_{surface,volume}``: external aerodynamics of cars (DrivAerML, arXiv:2408.11969) in the sizes of
  PhysicsNeMo's recipe; ``..._unified``: those of its later recipe. A point's ``x`` is its position and normal on the
  surface, its position and signed distance (and direction of the surface) in the volume.
- ``transolver_nano*``: small siblings that train on a CPU in seconds, for tests and demos.

Every argument of :class:`~dpzoo.models.transolver.Transolver` can be overridden.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dpzoo.models.registry import register_model
from dpzoo.models.transolver import Transolver

PDE: dict[str, Any] = {"space_dim": 2, "embed_dim": 128, "mlp_ratio": 1, "num_slices": 64}
CAR: dict[str, Any] = {"embed_dim": 256, "mlp_ratio": 2, "num_slices": 512}
UNIFIED: dict[str, Any] = {"embed_dim": 256, "mlp_ratio": 4, "num_slices": 256}
NANO: dict[str, Any] = {"embed_dim": 32, "depth": 2, "num_heads": 4, "num_slices": 8, "out_dim": 2}

VARIANTS: dict[str, dict[str, Any]] = {
    "darcy": {**PDE, "fun_dim": 1, "grid": (85, 85), "unified_pos": True},
    "navier_stokes": {
        **PDE,
        "fun_dim": 10,
        "grid": (64, 64),
        "unified_pos": True,
        "embed_dim": 256,
        "num_slices": 32,
    },
    "elasticity": PDE,
    "plasticity": {**PDE, "fun_dim": 1, "out_dim": 4, "grid": (101, 31), "time": True},
    "airfoil": {**PDE, "grid": (221, 51)},
    "pipe": {**PDE, "grid": (129, 129), "mlp_ratio": 2},
    "shapenet_car": {"space_dim": 7, "out_dim": 4, "embed_dim": 256, "mlp_ratio": 2, "num_slices": 32},
    "plus_aircraft": {
        "space_dim": 7,
        "out_dim": 6,
        "embed_dim": 256,
        "depth": 4,
        "mlp_ratio": 2,
        "num_slices": 32,
        "dropout": 0.1,
        "plus": True,
        "condition_dim": 3,
    },
    "drivaer_surface": {**CAR, "space_dim": 6, "fun_dim": 2, "out_dim": 4},
    "drivaer_volume": {**CAR, "space_dim": 7, "fun_dim": 2, "out_dim": 5},
    "drivaer_surface_unified": {**UNIFIED, "space_dim": 6, "fun_dim": 3, "out_dim": 4},
    "drivaer_volume_unified": {**UNIFIED, "space_dim": 7, "fun_dim": 3, "out_dim": 5, "depth": 12},
    "nano": NANO,
    "nano_2d": {**NANO, "space_dim": 2, "fun_dim": 1, "grid": (8, 6)},
    "nano_3d": {**NANO, "space_dim": 3, "grid": (4, 4, 3)},
    "plus_nano": {**NANO, "plus": True, "condition_dim": 2},
}
# Sizes that are the same for all, so that variants which differ only in them are the same model when tiny.
TINY: dict[str, Any] = {
    "space_dim": 3,
    "out_dim": 2,
    "embed_dim": 16,
    "depth": 2,
    "num_heads": 2,
    "mlp_ratio": 2,
    "num_slices": 5,
    "dropout": 0.0,
    "slice_noise": "never",
    "ref": 3,
}


def _register(name: str, variant: Mapping[str, Any]) -> None:
    def build(**kwargs: Any) -> Transolver:
        return Transolver(**{**variant, **kwargs})

    build.__name__ = build.__qualname__ = name
    build.__doc__ = f"Transolver({', '.join(f'{k}={v!r}' for k, v in variant.items())})"
    tiny = {**TINY, **{name: min(variant.get(name, 0), 1) for name in ("fun_dim", "condition_dim")}}
    if "grid" in variant:
        tiny["grid"] = (9, 4, 3)[: len(variant["grid"])]
    register_model(tiny=tiny, cut_dims=(1, 1 if variant.get("fun_dim") else None, None, None))(build)


for _name, _variant in VARIANTS.items():
    _register(f"transolver_{_name}", _variant)
