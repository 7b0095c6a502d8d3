from dataclasses import replace

import pytest
import torch
from torch import nn

from dpzoo.shard import MissingShardPatch, ShardTensor
from dpzoo.testing import OpCase, ParityError, distributed, op_test, run_case

CASES = [
    OpCase("gelu", fn=nn.functional.gelu, shape=(2, 7, 9), shard=1, mesh2d=(1, 2)),
    OpCase("linear", lambda: nn.Linear(3, 4), shape=(2, 7, 3), shard=1),
    OpCase(
        "add misaligned",
        fn=lambda x, y: x + y,
        shape=[(2, 7), (2, 7)],
        shard=[1, 1],
        layouts=("uneven", "misaligned"),
        mesh2d=[(0, 1), (0, 1)],
    ),
    OpCase("mul by plain", fn=lambda x, w: x * w, shape=(2, 7), shard=1, plain=[(1, 7)], layouts=("uneven", (3, 4))),
    OpCase("log", fn=torch.log, shape=(7,), shard=0, fill=lambda shape: torch.rand(shape).double() + 1, ranks=(2,)),
]

WRONG = OpCase("wrong when uneven", fn=lambda x: wrong_when_uneven(x), shape=(8,), shard=0, subgroups=False)

NO_RULE = OpCase("op without a rule", fn=torch.linalg.svdvals, shape=(2, 4, 3), shard=0)

test_rows = op_test(CASES)


def wrong_when_uneven(x):
    even = not isinstance(x, ShardTensor) or len(set(x._spec.sharding_shapes()[0])) == 1
    return x * 1.0 if even else x * 1.1


@distributed(ranks=2)
def test_failing_row_names_case_and_layout():
    with pytest.raises(ParityError) as caught:
        run_case(WRONG, "2")
    assert "OpCase 'wrong when uneven', layout 'uneven'" in caught.value.__notes__[-1]


@distributed(ranks=2)
def test_a_row_that_only_gathers_must_say_so():
    run_case(replace(NO_RULE, gathers=True), "2")
    with pytest.raises(MissingShardPatch):
        run_case(NO_RULE, "2")


def test_walks():
    assert WRONG.walks == ["1", "2", "3", "4"]
    assert CASES[0].walks == ["1", "2", "3", "4", "rows", "columns", "grid"]


def test_bad_rows_are_refused():
    with pytest.raises(ValueError, match=r"either build= .* or fn="):
        OpCase("nothing", shape=(3,))
    with pytest.raises(ValueError, match="for 1 inputs"):
        OpCase("too many", fn=torch.exp, shape=(3,), shard=[0, 1])


def test_rows_must_be_findable():
    local_cases = [CASES[0]]
    row = op_test(local_cases)
    with pytest.raises(TypeError, match="global variable"):
        row(0, "1")
