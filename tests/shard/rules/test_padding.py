"""`F.pad` in every mode on any side, cropping too: longer than a shard, on one cut dim or several."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpzoo.shard import Shard, scatter_tensor
from dpzoo.shard.traffic import count_traffic
from dpzoo.testing import OpCase, assert_parity, distributed, domain_mesh, expect_same_error, op_test
from tests.shard.rules.inputs import FEW
from tests.shard.rules.inputs import cut as _cut

ONCE: dict[str, Any] = {"ranks": (3,), "subgroups": False}
IMAGE: dict[str, Any] = {"shape": (2, 3, 9, 6), "shard": 2, "mesh2d": (2, 3)}
HARD = ("even", "uneven", "tiny", "empty", "empty_first", "empty_last")


def _second(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Any]:
    """`fn` and its first derivative: a backward through it is a second one."""

    def call(x: Tensor) -> Any:
        out = fn(x)
        return out, torch.autograd.grad(out.pow(3).sum(), x, create_graph=True)[0]

    return call


def _whole_numbers(shape: tuple[int, ...]) -> Tensor:
    return torch.randint(-9, 10, shape)


def _truths(shape: tuple[int, ...]) -> Tensor:
    return torch.rand(shape) < 0.5


def _pads(*pads: Any, mode: str = "constant", **options: Any) -> Callable[[Tensor], Any]:
    return lambda x: tuple(F.pad(x, pad, mode, **options) for pad in pads)


CASES = [
    OpCase(
        "constant",
        fn=_pads((1, 2, 3, 4), (0, 0, 0, 5), (0, 0, 12, 0), value=7.0),
        layouts=HARD,
        covers=("pad",),
        **IMAGE,
    ),
    OpCase("constant, every dim", fn=_pads((1, 0, 2, 1, 0, 1, 1, 1), (0, 1)), **IMAGE, **FEW),
    OpCase(
        "constant, cropping",
        fn=_pads((-1, -2, -3, -1), (0, 0, -5, 0), (0, 0, 0, -7), (2, -3, -4, 6), (0, 0, 3, -4)),
        layouts=HARD,
        **IMAGE,
        **FEW,
    ),
    OpCase("constant, nothing left", fn=_pads((0, 0, -9, 0), (0, 0, -4, -5)), **IMAGE, **FEW),
    OpCase("constant, nothing to do", fn=lambda x: F.pad(x, (0, 0, 0, 0)) * F.pad(x, ()), **IMAGE, **ONCE),
    OpCase(
        "constant, whole numbers", fn=_pads((1, 1, 2, 2), value=3), fill=_whole_numbers, grads=False, **IMAGE, **ONCE
    ),
    OpCase("constant, truths", fn=_pads((1, 1, 2, 2), value=True), fill=_truths, grads=False, **IMAGE, **ONCE),
    OpCase(
        "constant, complex",
        fn=_pads((1, 1, 2, 2), value=2.0),
        fill=lambda s: torch.randn(s, dtype=torch.complex128),
        **IMAGE,
        **ONCE,
    ),
    OpCase("constant, 1-D", fn=_pads((2, 3), (-2, 3), value=1.0), shape=(9,), shard=0, **FEW),
    OpCase(
        "constant, batch and channels",
        fn=_pads((0, 0, 0, 0, 1, 2, 3, 0)),
        shape=(5, 4, 3, 2),
        shard=0,
        mesh2d=(0, 1),
        **FEW,
    ),
    OpCase(
        "constant, spellings",
        fn=lambda x: (
            torch.constant_pad_nd(x, [1, 0, 0, 2], 5),
            torch.constant_pad_nd(input=x, pad=(0, 1)),
            F.pad(input=x, pad=[0, 0, 1, 1], value=2.0),
            torch._C._nn.pad(x, (0, 0, 1, 0), "constant", 1.0),
        ),
        **IMAGE,
        **ONCE,
    ),
    OpCase("constant, no samples", fn=_pads((1, 1, 2, 2)), shape=(0, 3, 9, 6), shard=2, **ONCE),
    OpCase("constant, a dim of size 0", fn=_pads((1, 1, 2, 2), value=4.0), shape=(2, 3, 0, 6), shard=2, **ONCE),
    OpCase("constant, twice", fn=_second(lambda x: F.pad(x, (1, 1, 3, -2))), **IMAGE, **ONCE),
    OpCase("ConstantPad2d", lambda: nn.ConstantPad2d((1, 0, 2, 3), 4.0), **IMAGE, **ONCE),
    OpCase(
        "reflect",
        fn=_pads((2, 1, 3, 4), (0, 0, 8, 0), (0, 0, 0, 8), (5, 5, 8, 8), mode="reflect"),
        layouts=HARD,
        **IMAGE,
        **FEW,
    ),
    OpCase("reflect, cropping", fn=_pads((-1, 2, 3, -2), (0, 0, -4, -3), mode="reflect"), **IMAGE, **FEW),
    OpCase("reflect, 1-D", fn=_pads((3, 0), (0, 8), mode="reflect"), shape=(3, 9), shard=1, **FEW),
    OpCase(
        "reflect, 3-D",
        fn=_pads((1, 0, 2, 1, 3, 1), mode="reflect"),
        shape=(1, 2, 7, 4, 5),
        shard=2,
        mesh2d=(2, 4),
        **FEW,
    ),
    OpCase("reflect, batch", fn=_pads((1, 1, 2, 2), mode="reflect"), shape=(5, 2, 4, 3), shard=0, mesh2d=(0, 1), **FEW),
    OpCase("reflect, twice", fn=_second(lambda x: F.pad(x, (1, 1, 3, 2), mode="reflect")), **IMAGE, **ONCE),
    OpCase(
        "replicate",
        fn=_pads((2, 1, 3, 4), (0, 0, 12, 0), (0, 0, 0, 12), mode="replicate"),
        layouts=HARD,
        **IMAGE,
        **FEW,
    ),
    OpCase("replicate, cropping", fn=_pads((-1, 2, 3, -2), (0, 0, -4, -3), mode="replicate"), **IMAGE, **FEW),
    OpCase(
        "cropping to the bone",
        fn=lambda x: (
            _pads((0, 0, -9, 3), (0, 0, 4, -9), (0, 0, -6, 8), (0, 0, 8, -5), mode="replicate")(x),
            _pads((0, 0, -6, 8), (0, 0, 8, -5), mode="reflect")(x),
            _pads((0, 0, -6, 3), (0, 0, 4, -5), mode="circular")(x),
        ),
        **IMAGE,
        **FEW,
    ),
    OpCase(
        "circular, longer than what is left",
        fn=_pads((0, 0, -6, 5), mode="circular"),
        gathers=True,
        **IMAGE,
        **ONCE,
    ),
    OpCase("replicate, unbatched", lambda: nn.ReplicationPad2d((1, 2, 3, 1)), (3, 9, 6), 1, **FEW),
    OpCase("replicate, 3-D", lambda: nn.ReplicationPad3d((1, 0, 2, 1, 3, 1)), (1, 2, 7, 4, 5), 2, mesh2d=(2, 4), **FEW),
    OpCase(
        "circular",
        fn=_pads((2, 1, 3, 4), (0, 0, 9, 0), (0, 0, 0, 9), (6, 6, 9, 9), mode="circular"),
        layouts=HARD,
        **IMAGE,
        **FEW,
    ),
    OpCase("circular, cropping", fn=_pads((-1, 2, 3, -2), (0, 0, -4, -3), mode="circular"), **IMAGE, **FEW),
    OpCase("circular, 1-D", lambda: nn.CircularPad1d((3, 2)), (2, 3, 9), 2, **FEW),
    OpCase("circular, 3-D", lambda: nn.CircularPad3d((1, 0, 2, 1, 3, 1)), (1, 2, 7, 4, 5), 2, mesh2d=(2, 4), **FEW),
    OpCase("circular, twice", fn=_second(lambda x: F.pad(x, (1, 1, 3, 2), mode="circular")), **IMAGE, **ONCE),
    OpCase(
        "circular, whole numbers",
        fn=_pads((1, 1, 2, 2), mode="circular"),
        fill=_whole_numbers,
        grads=False,
        **IMAGE,
        **ONCE,
    ),
    OpCase(
        "longitude circular, latitude constant",
        fn=lambda x: F.pad(F.pad(x, (2, 2, 0, 0), mode="circular"), (0, 0, 2, 2)),
        shape=(1, 2, 6, 9),
        shard=3,
        mesh2d=(2, 3),
        **FEW,
    ),
]

test_pad = op_test(CASES)


@distributed(ranks=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype: torch.dtype):
    torch.manual_seed(0)
    for mode in ("constant", "reflect", "replicate", "circular"):
        x, grads = torch.randn(1, 2, 9, 6), dtype is torch.float32  # half sums of many terms depend on their order
        assert_parity(_pads((1, 2, 3, 1), mode=mode), x, 2, (3, 6), dtype=dtype, grads=grads, strict=True)


@distributed(ranks=2)
def test_result_is_new_memory():
    """torch's pad never returns its input; nor does ours, where there is nothing to do."""
    x = scatter_tensor(torch.zeros(1, 1, 4, 4), 0, domain_mesh(), [Shard(2)])
    F.pad(x, (0, 0, 0, 0)).add_(1)
    assert x.sum().item() == 0


@distributed(ranks=3)
def test_communication():
    x = scatter_tensor(torch.randn(2, 3, 9, 6, dtype=torch.float64), 0, domain_mesh(), [Shard(2)])
    row, rank = 2 * 3 * 6 * 8, domain_mesh().get_local_rank()
    with count_traffic() as traffic:
        F.pad(x, (1, 1, 2, 2))
        F.pad(x, (1, 1, 0, 0), mode="circular")
        F.pad(x, (0, 0, 2, 2), mode="reflect")  # rows 1, 2 and 6, 7 are already there
        F.pad(x, (0, 0, 2, 2), mode="replicate")
    assert (traffic.calls, traffic.nbytes) == (0, 0)
    with count_traffic() as traffic:
        F.pad(x, (0, 0, 2, 1), mode="circular")
    assert (traffic.calls, traffic.nbytes) == (1, {0: row, 1: 0, 2: 2 * row}[rank])


BAD: dict[str, Callable[[Tensor], Any]] = {
    "reflect as long as the dim": lambda x: F.pad(x, (0, 0, 9, 0), mode="reflect"),
    "reflect too long behind": lambda x: F.pad(x, (0, 0, 0, 9), mode="reflect"),
    "circular more than once around": lambda x: F.pad(x, (0, 0, 10, 0), mode="circular"),
    "cropping more than there is": lambda x: F.pad(x, (0, 0, -6, -5)),
    "odd number of amounts": lambda x: F.pad(x, (1, 2, 3)),
    "more dims than there are": lambda x: F.pad(x, (1,) * 10),
    "reflect of every dim": lambda x: F.pad(x, (1,) * 8, mode="reflect"),
    "value with reflect": lambda x: F.pad(x, (1, 1), mode="reflect", value=2.0),
    "unknown mode": lambda x: F.pad(x, (1, 1), mode="mirror"),
    "amounts that are no numbers": lambda x: F.pad(x, ("a", "b")),  # type: ignore[arg-type]
    "reflect crops too much": lambda x: F.pad(x, (0, 0, -5, -5), mode="reflect"),
    "replicate of an empty dim": lambda x: F.pad(x[:, :, :0], (0, 0, 1, 1), mode="replicate"),
}


@distributed(ranks=2)
@pytest.mark.parametrize("name", BAD)
def test_bad_input_raises_what_torch_raises(name: str):
    expect_same_error(BAD[name], torch.randn(1, 3, 9, 6), 2)


@distributed(ranks=1)
def test_one_rank_has_both_ends():
    full = torch.arange(18.0).view(1, 2, 9)
    for mode in ("constant", "reflect", "replicate", "circular"):
        assert torch.equal(F.pad(_cut(full, 2), (2, 1), mode).full_tensor(), F.pad(full, (2, 1), mode))
