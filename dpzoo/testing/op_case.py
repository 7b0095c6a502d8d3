"""`OpCase`: a test of an op in one line, walked over layouts, numbers of ranks, a 2-D mesh and later sub-groups.

CASES = [
    OpCase("conv2d k4 s2 p1", lambda: nn.Conv2d(3, 4, 4, 2, 1), shape=(2, 3, 17, 8), shard=2),
    OpCase("add", fn=lambda x, y: x + y, shape=[(4, 17), (17,)], shard=[1, 0], covers=("aten.add",)),
]
test_ops = op_test(CASES)
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from dpzoo.shard import GatherWarning
from dpzoo.testing.comparing import Limits
from dpzoo.testing.cutting import Cut, InputPlacement, plan_cut
from dpzoo.testing.meshes import column_mesh, domain_mesh, grid_mesh, row_mesh
from dpzoo.testing.parity import Parity
from dpzoo.testing.pool import session_pool
from dpzoo.testing.seeding import set_seed
from dpzoo.testing.transport import load_module

Shape = tuple[int, ...]
Fill = Callable[[Shape], Tensor]


@dataclass(frozen=True)
class OpCase:
    """One op, or one module, with its inputs.

    Args:
        name: what the test is called.
        build: makes the module under test; called on every rank with the same seed.
        fn: the function under test, instead of `build`; it gets the inputs, then the plain tensors.
        shape: the input's shape, or a list with one shape per input.
        shard: the dim that is cut (None: plain), one for all inputs or a list with one per input.
        plain: shapes of plain tensors (weights) that follow the inputs; their gradients must be complete.
        fill: makes a tensor of a shape, `torch.randn` in float64 by default; one, or a list for inputs and plain.
        layouts: named layouts, each walked; "misaligned" cuts every next input in other places. A tuple of sizes
            is walked on that many ranks.
        ranks: numbers of ranks.
        subgroups: also walk the rows and the columns of a (2, 2) mesh: two ranks each, not the first, with a stride.
        mesh2d: dims cut by the two axes of a (2, 2) mesh, e.g. `(2, 3)`, for all sharded inputs or a list with one per
            input; not walked when None.
        grads: also compare gradients.
        gathers: the op may gather its input. Without it a row that passes only through the fallback fails.
        rtol, atol: tolerances, those of `assert_parity` by default.
        covers: names of registered rules that this row tests.
    """

    name: str
    build: Callable[[], nn.Module] | None = None
    shape: Shape | Sequence[Shape] = ()
    shard: int | Sequence[int | None] | None = None
    fn: Callable[..., Any] | None = None
    plain: Sequence[Shape] = ()
    fill: Fill | Sequence[Fill] | None = None
    layouts: Sequence[str | tuple[int, ...]] = ("even", "uneven", "empty")
    ranks: Sequence[int] = (1, 2, 3, 4)
    subgroups: bool = True
    mesh2d: tuple[int | None, ...] | Sequence[tuple[int | None, ...] | None] | None = None
    grads: bool = True
    gathers: bool = False
    rtol: float | None = None
    atol: float | None = None
    covers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if (self.build is None) == (self.fn is None):
            raise ValueError(f"OpCase {self.name!r}: give either build= (makes a module) or fn=")
        if isinstance(self.shard, (list, tuple)) and len(self.shard) != len(self.shapes):
            raise ValueError(
                f"OpCase {self.name!r}: shard={self.shard} for {len(self.shapes)} inputs; give one per input"
            )

    @property
    def shapes(self) -> list[Shape]:
        """One shape per input."""
        if all(isinstance(size, int) for size in self.shape):
            return [tuple(size for size in self.shape if isinstance(size, int))]
        return [tuple(shape) for shape in self.shape if not isinstance(shape, int)]

    @property
    def walks(self) -> list[str]:
        """The meshes of this row: "1".."4" ranks, "rows", "columns", "grid"."""
        walks = [str(ranks) for ranks in self.ranks]
        if self.subgroups:
            walks += ["rows", "columns"]
        return walks if self.mesh2d is None else [*walks, "grid"]

    def tensors(self) -> list[Tensor]:
        """The full inputs, then the plain tensors."""
        shapes = [*self.shapes, *(tuple(shape) for shape in self.plain)]
        fills = [self.fill] * len(shapes) if self.fill is None or callable(self.fill) else list(self.fill)
        if len(fills) != len(shapes):
            raise ValueError(f"OpCase {self.name!r}: {len(fills)} fills for {len(shapes)} inputs and plain tensors")
        return [
            torch.randn(shape, dtype=torch.float64) if fill is None else fill(shape)
            for fill, shape in zip(fills, shapes, strict=True)
        ]

    def placements(self, axes: int) -> list[InputPlacement]:
        """How the inputs, then the plain tensors, are cut on a mesh of so many axes."""
        cuts: list[InputPlacement]
        if axes == 1:
            cuts = list(self.shard) if isinstance(self.shard, (list, tuple)) else [self.shard] * len(self.shapes)
        else:
            assert self.mesh2d is not None
            per_input = any(isinstance(entry, tuple) for entry in self.mesh2d)
            cuts = list(self.mesh2d) if per_input else [self.mesh2d] * len(self.shapes)  # type: ignore[list-item]
        return cuts + [None] * len(self.plain)


def op_test(cases: Sequence[OpCase], timeout: float = 60.0) -> Callable[..., None]:
    """A pytest test of all rows, one per row and mesh. Assign it to a `test_` name in the module that has the list.

    `cases` must be a list or tuple that is a global of that module: a rank finds a row by module, name and index, since
    the functions in it can not be pickled.
    """
    import pytest

    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    home = frame.f_back.f_globals

    def test(index: int, walk: str) -> None:
        __tracebackhide__ = True
        names = [name for name, value in home.items() if value is cases]
        if not names:
            raise TypeError(f"op_test: the list of cases must be a global variable of {home['__name__']}")
        arguments = (home["__name__"], home.get("__file__"), names[0], index, walk)
        ranks = int(walk) if walk.isdigit() else 4
        session_pool().run(run_row, *arguments, ranks=ranks, timeout=timeout)

    test.__module__ = home["__name__"]
    parameters = [
        pytest.param(index, walk, id=f"{case.name}-{walk}") for index, case in enumerate(cases) for walk in case.walks
    ]
    marked: Callable[..., None] = pytest.mark.parametrize(("index", "walk"), parameters)(test)
    return marked


def run_row(module: str, file: str | None, list_name: str, index: int, walk: str) -> None:
    """What a rank does for one row on one mesh: find the row, then `run_case`."""
    run_case(getattr(load_module(module, file), list_name)[index], walk)


def run_case(case: OpCase, walk: str) -> None:
    """Parity of one row over all its layouts on the mesh of `walk`; all ranks of the task call it."""
    __tracebackhide__ = True
    mesh = _mesh_of(walk)
    set_seed(0)
    tensors, placements = case.tensors(), case.placements(mesh.ndim)
    set_seed(1)
    subject = case.build() if case.build is not None else case.fn
    assert subject is not None
    parity = Parity(subject, tensors, mesh, grads=case.grads, strict=not case.gathers)
    for layout, cuts in _distinct_cuts(case, tensors, placements, mesh):
        note = f"in OpCase {case.name!r}, layout {layout!r}, mesh {walk!r}: {[str(cut) for cut in cuts]}"
        with warnings.catch_warnings():
            if case.gathers:
                warnings.simplefilter("ignore", GatherWarning)
            parity.run_on(cuts, note)
    parity.compare(Limits(parity.dtype, case.rtol, case.atol))


def _mesh_of(walk: str) -> DeviceMesh:
    named = {"rows": row_mesh, "columns": column_mesh, "grid": grid_mesh}
    return named[walk]() if walk in named else domain_mesh(int(walk))


def _distinct_cuts(
    case: OpCase, tensors: Sequence[Tensor], placements: Sequence[InputPlacement], mesh: DeviceMesh
) -> Iterator[tuple[str | tuple[int, ...], list[Cut | None]]]:
    """Each layout with the cuts it makes; a layout that cuts like an earlier one (all do on one rank) is left out."""
    seen: list[list[Cut | None]] = []
    for layout in case.layouts:
        if not isinstance(layout, str) and len(layout) != max(mesh.shape):
            continue
        misaligned = layout == "misaligned"
        sizes: Any = "uneven" if misaligned else layout
        if not isinstance(layout, str):
            sizes = layout if mesh.ndim == 1 else (layout,) * mesh.ndim
        cuts = [
            plan_cut(tensor.shape, mesh.shape, placement, sizes, turn=position if misaligned else 0)
            for position, (tensor, placement) in enumerate(zip(tensors, placements, strict=True))
        ]
        if cuts not in seen:
            seen.append(cuts)
            yield layout, cuts
