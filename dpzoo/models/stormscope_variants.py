"""The named StormScope variants (arXiv:2601.17268), each an EDM-preconditioned DiT with neighborhood attention.

- ``stormscope``: 1024 x 1792 points (3 km), patches of 4: 256 x 448 tokens; depth 16, width 768, 16 heads, window 31.
  Eight channels are forecast from the six states before, two channels of background (the sun's height now and then)
  and three invariants (latitude, longitude, terrain).
- ``stormscope_6km``: the same on every second point, 512 x 896, from one state before and three channels of background.
- ``stormscope_shallow``: the full grid on a network so thin and shallow that a CPU runs it.
- ``stormscope_small``: likewise at 512 x 896.
- ``stormscope_nano``: 64 x 112 points: trains on a CPU in seconds.

How the released models share out their condition channels depends on the release; override the counts to match one.
Every argument of :class:`~dpzoo.models.stormscope.StormScope` can be overridden, as in
``create_model("stormscope_small", in_chans=3, mask_token=True)``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dpzoo.models.registry import register_model
from dpzoo.models.stormscope import StormScope

PAPER: dict[str, Any] = {
    "embed_dim": 768,
    "depth": 16,
    "num_heads": 16,
    "kernel_size": 31,
    "pos_embed": "learned",
    "time_freq_dim": 768,
    "time_hidden_dim": 1536,
}
THIN: dict[str, Any] = {"embed_dim": 64, "depth": 2, "num_heads": 4, "kernel_size": 7, "pos_embed": "learned"}
GRID_3KM: dict[str, Any] = {
    "img_size": (1024, 1792), "in_chans": 8, "state_chans": 48, "background_chans": 2, "invariant_chans": 3,
}  # fmt: skip
GRID_6KM: dict[str, Any] = {
    "img_size": (512, 896), "in_chans": 8, "state_chans": 8, "background_chans": 3, "invariant_chans": 3,
}  # fmt: skip
NANO: dict[str, Any] = {
    "img_size": (64, 112), "in_chans": 2, "state_chans": 4, "background_chans": 1, "invariant_chans": 2,
    "kernel_size": 5,
}  # fmt: skip
TINY: dict[str, Any] = {
    "img_size": (24, 16), "in_chans": 2, "state_chans": 4, "background_chans": 1, "invariant_chans": 2,
    "embed_dim": 24, "depth": 1, "num_heads": 2, "kernel_size": 3, "time_freq_dim": 8, "time_hidden_dim": 16,
}  # fmt: skip


def _register(name: str, *parts: Mapping[str, Any]) -> None:
    variant = {key: value for part in parts for key, value in part.items()}

    def build(**kwargs: Any) -> StormScope:
        return StormScope(**{**variant, **kwargs})

    build.__name__ = build.__qualname__ = name
    build.__doc__ = f"StormScope({', '.join(f'{k}={v!r}' for k, v in variant.items())})"
    register_model(tiny=TINY)(build)


_register("stormscope", GRID_3KM, PAPER)
_register("stormscope_6km", GRID_6KM, PAPER)
_register("stormscope_shallow", GRID_3KM, THIN)
_register("stormscope_small", GRID_6KM, THIN)
_register("stormscope_nano", THIN, NANO)
