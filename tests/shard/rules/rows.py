"""Rows of `OpCase` for the many ops of one shape that share their path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dpzoo.testing import OpCase

SHAPE = (3, 7, 4)


def case(
    name: str,
    fn: Callable[..., Any],
    covers: tuple[str, ...] = (),
    shape: Any = SHAPE,
    shard: Any = 1,
    **options: Any,
) -> OpCase:
    """A row on 2 and 3 ranks and a 2-D mesh; the sub-groups and other numbers of ranks are walked by some rows."""
    options = {"ranks": (2, 3), "subgroups": False, "mesh2d": (0, 1), "layouts": ("uneven", "empty")} | options
    return OpCase(name, fn=fn, shape=shape, shard=shard, covers=covers, **options)


def everywhere(name: str, fn: Callable[..., Any], covers: tuple[str, ...] = (), **options: Any) -> OpCase:
    """A row on all meshes and layouts."""
    return case(name, fn, covers, ranks=(1, 2, 3, 4), subgroups=True, layouts=("even", "uneven", "empty"), **options)
