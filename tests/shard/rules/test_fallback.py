"""Ops without a rule, what they say, strict mode, and handlers of users."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from dpzoo.shard import (
    GatherWarning,
    MissingShardPatch,
    Replicate,
    Shard,
    ShardTensor,
    reset_warnings,
    strict,
)
from dpzoo.shard.tables import ANSWERED
from dpzoo.shard.tensor import DISPATCH, FUNCTIONS, NAMED
from dpzoo.testing import OpCase, distributed, expect_error, op_test
from tests.shard.rules.inputs import FEW
from tests.shard.rules.inputs import cut as _cut
from tests.shard.rules.inputs import numbers as _numbers

CASES = [
    OpCase("linalg", fn=lambda x: [torch.linalg.svdvals(x), torch.linalg.pinv(x)], shape=(2, 4, 3), shard=0,
           gathers=True, mesh2d=(0, 1)),
    OpCase("tensors in a list", fn=lambda x, w: torch.linalg.multi_dot([x, w, x]), shape=(4, 3), shard=0,
           plain=[(3, 4)], gathers=True, **FEW),
    OpCase("a tuple of results", fn=lambda x: torch.linalg.slogdet(x), shape=(3, 3), shard=0, gathers=True, **FEW),
    OpCase("values for Python", fn=lambda x: [torch.allclose(x, x), torch.is_nonzero(x.sum()), x.tolist()],
           shape=(4, 3), shard=0, grads=False, gathers=True, **FEW),
    OpCase("second order", fn=lambda x: torch.autograd.grad(torch.linalg.inv(x).sum(), x, create_graph=True)[0],
           shape=(3, 3), shard=0, gathers=True, **FEW),
    OpCase("bincount", fn=lambda x: [torch.bincount(x, minlength=12), torch.unique(x)], shape=(9,), shard=0,
           fill=lambda shape: torch.randint(0, 9, shape), gathers=True, **FEW),
]  # fmt: skip

test_ops = op_test(CASES)


# ---------------------------------------------------------------------- the report
class _Inner(nn.Module):
    def forward(self, x):
        return torch.linalg.svdvals(x)


class _Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([_Inner(), nn.Sequential(nn.Identity(), _Inner())])

    def forward(self, x):
        for block in self.blocks:
            block(x)
        return torch.linalg.svdvals(x)


def _gathers_reported(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(w.message) for w in caught if issubclass(w.category, GatherWarning)]


@distributed(ranks=2)
def test_a_gather_is_reported_once_per_place_with_op_bytes_and_module():
    x, model = _cut(_numbers(4, 3)), _Outer()
    reset_warnings()
    said = _gathers_reported(lambda: model(x))
    assert len(said) == 3
    for text, place in zip(said, ("_Outer.blocks.0", "_Outer.blocks.1.1", "_Outer"), strict=True):
        assert text.startswith(
            f"linalg_svdvals in {place} has no rule for float64(4, 3) cut [dim 0 over 'domain': 2+2]"
        )
        assert "gathering 96 bytes on every rank" in text
    assert _gathers_reported(lambda: model(x)) == []
    assert len(_gathers_reported(lambda: torch.linalg.svdvals(x))) == 1
    reset_warnings()
    assert len(_gathers_reported(lambda: model(x))) == 3


@distributed(ranks=[1, 2])
def test_nothing_is_reported_where_nothing_is_gathered(ranks):
    reset_warnings()
    whole = _cut(_numbers(4, 3)).redistribute(placements=[Replicate()])
    assert _gathers_reported(lambda: torch.linalg.svdvals(whole)) == []
    assert len(_gathers_reported(lambda: torch.linalg.svdvals(_cut(_numbers(4, 3))))) == ranks - 1


@distributed(ranks=2)
def test_strict_raises_before_anything_is_sent():
    x = _cut(_numbers(4, 3), requires_grad=True)
    calls = (
        lambda: torch.linalg.svdvals(x),
        lambda: torch.linalg.svdvals(x.detach(), out=torch.empty(3, dtype=torch.float64)),
        lambda: x.detach().put_(torch.tensor([0]), torch.ones(1, dtype=torch.float64)),
        lambda: _Outer()(x),
    )
    with strict():
        for call in calls:
            expect_error(call, MissingShardPatch, "would gather 96 bytes")
        with strict(False), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.linalg.svdvals(x)
        expect_error(calls[0], MissingShardPatch, "redistribute")
        assert torch.equal((x * 2 + 1).sum(0).full_tensor(), (_numbers(4, 3) * 2 + 1).sum(0))


@distributed(ranks=2)
def test_strict_makes_no_collective():
    """One rank alone meets the error, and can tell at once: nothing was waiting for the other."""
    x = _cut(_numbers(4, 3))
    if torch.distributed.get_rank() == 0:
        with strict(), pytest.raises(MissingShardPatch):
            torch.linalg.svdvals(x)


@distributed(ranks=2)
def test_a_mode_that_counts_ops_changes_none_of_them():
    """Such a mode calls the ops below autograd from Python."""
    x = _cut(_numbers(4, 3), 0).requires_grad_(True)
    with strict(), FlopCounterMode(display=False):
        F.gelu(F.layer_norm(x, (3,)) * 2).sum().backward()
    want = _numbers(4, 3).requires_grad_(True)
    F.gelu(F.layer_norm(want, (3,)) * 2).sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), want.grad)


@distributed(ranks=2)
def test_out_of_a_gathered_op():
    full, reference = _numbers(4, 3), torch.linalg.svdvals(_numbers(4, 3))
    x, plain = _cut(full), torch.empty(3, dtype=torch.float64)
    cut = _cut(torch.zeros(3, dtype=torch.float64))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GatherWarning)
        assert torch.linalg.svdvals(x, out=plain) is plain
        assert torch.linalg.svdvals(x, out=cut) is cut
        expect_error(lambda: torch.linalg.svdvals(x, out=torch.empty(3, dtype=torch.int64)), RuntimeError, "dtype|type")
        q, r = _cut(torch.zeros_like(full)), torch.zeros(3, 3, dtype=torch.float64)
        torch.linalg.qr(x, out=(q, r))
    assert torch.equal(plain, reference)
    assert torch.equal(cut.full_tensor(), reference)
    torch.testing.assert_close(q.full_tensor() @ r, full)


# ---------------------------------------------------------------------- what gathering would falsify
def _noisy(x):
    if torch.overrides.has_torch_function_unary(x):
        return torch.overrides.handle_torch_function(_noisy, (x,), x)
    return x + torch.rand(x.shape)


@distributed(ranks=2)
def test_random_ops_without_a_rule_are_refused():
    x = _cut(torch.rand(4, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GatherWarning)
        expect_error(lambda: _noisy(x), MissingShardPatch, "_noisy draws random numbers")


@distributed(ranks=2)
def test_what_would_hand_out_a_shard_as_the_whole_is_refused():
    x = _cut(_numbers(4, 3))
    for name in ("data_ptr", "storage", "untyped_storage", "share_memory_", "pin_memory", "to_sparse"):
        expect_error(lambda n=name: getattr(x, n)(), MissingShardPatch, f"{name}.* cannot run on float64.4, 3.")
    expect_error(lambda: x.as_strided((2,), (1,)), MissingShardPatch, "as_strided")
    expect_error(lambda: x.numpy(), TypeError, "full_tensor")


# ---------------------------------------------------------------------- handlers of users
class _Registered:
    """Registers handlers and takes them away again."""

    def __enter__(self):
        self.before = [(table, dict(table)) for table in (FUNCTIONS, DISPATCH, NAMED, ANSWERED)]
        return self

    def __exit__(self, *_):
        for table, content in self.before:
            table.clear()
            table.update(content)


def _answer(func, types, args, kwargs):
    return "answered"


def _no_rule_function(x):
    if torch.overrides.has_torch_function_unary(x):
        return torch.overrides.handle_torch_function(_no_rule_function, (x,), x)
    return x * 2


@distributed(ranks=1)
def test_function_handlers_win_over_rules_and_stand_in_for_missing_ones():
    x = _cut(_numbers(4, 3))
    x.softmax(0), torch.add(x, x), _no_rule_function(x)  # all three are resolved already
    with _Registered():
        for func in (torch.softmax, Tensor.softmax, torch.add, Tensor.add, torch.linalg.svdvals, _no_rule_function):
            ShardTensor.register_function_handler(func, _answer)
        found = [torch.softmax(x, 0), x.softmax(0), x + x, torch.linalg.svdvals(x), _no_rule_function(x)]
        assert found == ["answered"] * 5
    assert torch.equal((x + x).full_tensor(), _numbers(4, 3) * 2)


@pytest.mark.parametrize("grad", [False, True])
@distributed(ranks=1)
def test_dispatch_handlers_win_over_built_in_ones(grad):
    x = _cut(_numbers(4, 3))
    calls = []

    def tripled(op, types, args, kwargs):
        calls.append(op)
        return ShardTensor(args[0]._local_tensor * 3, args[0]._spec)

    x.sin(), x.clone()
    with _Registered():
        ShardTensor.register_dispatch_handler(torch.ops.aten.sin.default, tripled)
        ShardTensor.register_named_function_handler("aten::clone", tripled)
        with torch.set_grad_enabled(grad):
            found = x.sin(), x.clone()
        for t in found:
            assert torch.equal(t.full_tensor(), _numbers(4, 3) * 3)
        assert calls == [torch.ops.aten.sin.default, torch.ops.aten.clone.default]


@pytest.mark.parametrize("met", [False, True])
@distributed(ranks=1)
def test_named_handlers_win(met):
    x = _cut(_numbers(4, 3))
    name = f"{_no_rule_function.__module__}._no_rule_function"
    with _Registered():
        FUNCTIONS.pop(_no_rule_function, None)
        if met:
            _no_rule_function(x)
        ShardTensor.register_named_function_handler(name, _answer)
        ShardTensor.register_named_function_handler("torch.nn.functional.gelu", _answer)
        ShardTensor.register_named_function_handler("torch.nn.functional.layer_norm", _answer)
        assert _no_rule_function(x) == "answered"
        assert F.layer_norm(x, (3,)) == "answered"


@pytest.mark.parametrize("by_name", [False, True])
@distributed(ranks=1)
def test_handlers_for_a_custom_op_answer_every_way_to_call_it(by_name):
    x = _cut(_numbers(4, 3))
    with _Registered():
        thrice = torch.library.custom_op("dpzoo_test::thrice", _thrice, mutates_args=())
        if by_name:
            ShardTensor.register_named_function_handler("dpzoo_test::thrice", _answer)
        else:
            ShardTensor.register_function_handler(thrice, _answer)
        packet = torch.ops.dpzoo_test.thrice
        assert [f(x) for f in (thrice, packet, packet.default)] == ["answered"] * 3


def _thrice(x: torch.Tensor) -> torch.Tensor:
    return x * 3


def _spread_out(func, types, args, kwargs):
    """The handler of docs: the result has another number of dims; only the sizes along the cut dim are taken."""
    y = args[0]
    local = y.to_local()
    return ShardTensor.from_local(
        torch.stack([local, local * 2], -1),
        device_mesh=y.device_mesh,
        placements=y.placements,
        sharding_shapes=y._spec.sharding_shapes(),
    )


@distributed(ranks=3)
def test_a_handler_may_give_a_result_of_other_dims():
    full = _numbers(7, 3)
    with _Registered():
        ShardTensor.register_function_handler(_no_rule_function, _spread_out)
        x = _cut(full, sizes=(4, 0, 3), requires_grad=True)
        out = _no_rule_function(x)
        assert out.shape == (7, 3, 2)
        assert out.placements == (Shard(0),)
        assert torch.equal(out.full_tensor(), torch.stack([full, full * 2], -1))
        out.sum().backward()
        assert torch.equal(x.grad.full_tensor(), torch.full_like(full, 3.0))


@torch.overrides.wrap_torch_function(lambda tensors: tensors)
def halve_all_(tensors):
    for t in tensors:
        t.mul_(0.5)


@distributed(ranks=2)
def test_an_unknown_function_that_writes_into_a_list_is_refused():
    """On gathered copies it would do nothing, without a word."""
    x = _cut(torch.ones(5, 2))
    expect_error(lambda: halve_all_([x]), MissingShardPatch, "halve_all_")
    assert torch.equal(x.full_tensor(), torch.ones(5, 2))
