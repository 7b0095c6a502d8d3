"""In-place ops on tensors and on views of them: values and gradients of torch, or an error on every rank."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpzoo.shard import MissingShardPatch, ShardError
from dpzoo.testing import OpCase, assert_parity, distributed, expect_error, op_test
from tests.shard.rules.inputs import FEW
from tests.shard.rules.inputs import cut as _cut
from tests.shard.rules.inputs import numbers as _numbers


def _edited(change):
    """Change a copy of the input in place and use it afterwards, so that gradients pass through the change."""

    def fn(x, *others):
        y = x * 1.5
        out = change(y, *others)
        return (y * y, out * 2) if isinstance(out, Tensor) else y * y

    return fn


def _case(name, change, shape=(9, 6), shard=0, others=(), dims=(), **options):
    return OpCase(name, fn=_edited(change), shape=[shape, *others], shard=[shard, *dims], **{**FEW, **options})


def _each(*changes):
    """Several changes in a row."""

    def change(y, *others):
        for one in changes:
            one(y, *others)
        return y

    return change


def _imul(y):
    y *= 3
    y += 1
    y /= 2
    y -= y.mean()
    y **= 2


def _no_grad(change):
    def changed(y):
        with torch.no_grad():
            change(y)

    return changed


def _row_twice(y):
    y[3] += 1
    y[-1] *= 2


def _read_before_and_after(y):
    row, rows, column = y[3], y[2:5], y[:, 1]
    y.mul_(2)
    y[3, 1] = 5.0
    return torch.cat([row[None], rows]) * column[:4, None]


def _two_views(y):
    a, b = y[3], y.select(0, 3)
    a.mul_(2)
    b.add_(1)
    return a * b


CASES = [
    # ------------------------------------------------------------------ the tensor itself
    _case("mul_", lambda y: y.mul_(3), ranks=(1, 2, 3, 4), subgroups=True, mesh2d=(0, 1)),
    _case("operators", _imul, mesh2d=(0, 1)),
    _case("unary", lambda y: y.sub_(1).mul_(2).abs_().pow_(2).clamp_(-1, 4).neg_().exp_()),
    _case("relu_", lambda y: F.relu(y.sub_(1), inplace=True)),
    _case("elu_", lambda y: F.elu_(y.sub_(1))),
    _case("leaky_relu_", lambda y: F.leaky_relu(y.sub_(1), 0.1, True)),
    _case("sgn_", lambda y: y.sgn_()),
    _case("copysign_", lambda y, w: y.copysign_(w), plain=[(6,)]),
    _case("fill_", lambda y: y.fill_(2.0)),
    _case("zero_", lambda y: y.zero_()),
    _case("masked_fill_", lambda y: y.masked_fill_(y > 0, 0.5)),
    _case("plain row", lambda y, w: y.mul_(w), plain=[(6,)], mesh2d=(0, 1), ranks=(1, 2, 3), subgroups=True),
    _case("plain column", lambda y, w: y.sub_(w, alpha=2), plain=[(9, 1)], mesh2d=(0, 1)),
    _case("plain of full size", lambda y, w: y.add_(w, alpha=2), plain=[(9, 6)], mesh2d=(0, 1)),
    _case("addcmul_", lambda y, a, b: y.addcmul_(a, b, value=0.5), plain=[(6,), (9, 1)]),
    _case("cut across", lambda y, b: y.add_(b).lerp_(b, 0.3), others=[(9, 6)], dims=[1], mesh2d=[(0, 1), (1, 0)]),
    _case("misaligned", lambda y, b: y.mul_(b), others=[(9, 6)], dims=[0], layouts=("uneven", "misaligned")),
    _case("row cut", lambda y, b: y.div_(b.abs() + 1), others=[(6,)], dims=[0]),
    _case("copy_ plain", lambda y, w: y.copy_(w), plain=[(6,)]),
    _case("copy_ cut across", lambda y, b: y.copy_(b), others=[(9, 6)], dims=[1], mesh2d=[(0, 1), (1, 0)]),
    _case("copy_ row", lambda y, b: y.copy_(b), others=[(6,)], dims=[0]),
    _case("copy_ of another dtype", lambda y, b: y.copy_(b.float()), others=[(9, 6)], dims=[0]),
    _case("fill_ by a tensor", lambda y, w: y.fill_(w.sum()), plain=[(2,)]),
    # ------------------------------------------------------------------ views that share memory
    _case("columns", lambda y: y[:, :2].mul_(3), mesh2d=(0, 1)),
    _case("rows", lambda y: y[2:5].add_(1), mesh2d=(0, 1), ranks=(1, 2, 3, 4), subgroups=True),
    _case("every third row", lambda y: y[1:8:3].mul_(2), mesh2d=(0, 1)),
    _case("rows by plain", lambda y, w: y[2:5].mul_(w), plain=[(6,)]),
    _case("rows copy plain", lambda y, w: y[2:5].copy_(w), plain=[(3, 6)]),
    _case("columns copy plain", lambda y, w: y[:, :2].copy_(w), plain=[(9, 2)]),
    _case("rows copy other rows", lambda y, b: y[2:5].copy_(b), others=[(3, 6)], dims=[1]),
    _case("a column", lambda y: y.select(1, 3).zero_(), mesh2d=(0, 1)),
    _case("transposed", _each(lambda y: y.t().mul_(2), lambda y: y.T[1:3].add_(1),
                              lambda y: y.transpose(0, 1)[:, 4:].mul_(3))),
    _case("views of views", _each(lambda y: y[1:][1:][:, 2].add_(1), lambda y: y.narrow(0, 1, 5)[2:, 1:4].mul_(2))),
    _case("unsqueezed", _each(lambda y: y.unsqueeze(0)[0, 2:4].mul_(2), lambda y: y[:, None].squeeze(1).add_(1))),
    _case("viewed", _each(lambda y: y.view(9, 2, 3)[:, 1].mul_(2), lambda y: y.view(-1).add_(1),
                          lambda y: y.flatten().mul_(3))),
    _case("diagonal", lambda y: y.diagonal().mul_(2)),
    _case("unfold of another dim", lambda y: y.unfold(1, 2, 2)[..., 0].mul_(2)),
    _case("moved dims", lambda y: y.movedim(0, 1)[0].mul_(2)),
    _case("parts, no_grad",
          _no_grad(lambda y: (y.chunk(2)[0].add_(1), y.split([2, 3, 4])[1].mul_(2), y.unbind(1)[2].mul_(2)))),
    _case("detached", lambda y: (y.detach()[2:4].mul_(2), None)[1]),
    # ------------------------------------------------------------------ views whose elements move
    _case("a row", lambda y: y.select(0, 3).zero_(), ranks=(1, 2, 3, 4), subgroups=True, mesh2d=(0, 1)),
    _case("a row by operators", _row_twice),
    _case("an element", _each(lambda y: y[3, 2].mul_(2), lambda y: y[4][1].add_(1),
                              lambda y: y[1:8][:, 1:4][2].mul_(2))),
    _case("a row, plain value", lambda y, w: y[3].mul_(w), plain=[(6,)]),
    _case("a row of a detached view", lambda y: (y.detach()[3].mul_(2), None)[1]),
    _case("rows one by one, no_grad", _no_grad(lambda y: [row.mul_(k) for k, row in enumerate(y.unbind(0))])),
    _case("views read after their base changed", _read_before_and_after, ranks=(1, 2, 3), mesh2d=(0, 1)),
    _case("two views of a row", _two_views),
    # ------------------------------------------------------------------ without a rule
    _case("index ops", _each(lambda y, w: y.index_add_(0, torch.tensor([1, 4]), w),
                             lambda y, w: y.index_copy_(0, torch.tensor([2, 5]), w),
                             lambda y, w: y.index_fill_(0, torch.tensor([3]), 2.0)), plain=[(2, 6)], gathers=True),
    _case("scatters", _each(lambda y, w: y.scatter_(0, torch.tensor([[1, 2, 3]]), w),
                            lambda y, w: y.scatter_add_(0, torch.tensor([[1, 2, 3]]), w),
                            lambda y, w: y.scatter_(1, torch.tensor([[1], [2]]), 2.0),
                            lambda y, w: y.scatter_reduce_(0, torch.tensor([[1, 2, 4]]), w, "sum")),
          plain=[(1, 3)], gathers=True),
    _case("puts", _each(lambda y, w: y.index_put_((torch.tensor([1, 4]),), w),
                        lambda y, w: y.index_put_((torch.tensor([1, 1]),), w, accumulate=True),
                        lambda y, w: y.masked_scatter_(torch.eye(9, 6).bool(), w)), plain=[(2, 6)], gathers=True),
    _case("sharded values", lambda y, b: y.index_add_(0, torch.tensor([1, 4]), b), others=[(2, 6)], dims=[1],
          gathers=True),
    _case("triangles", lambda y: y.tril_().fill_diagonal_(2.0), gathers=True),
]  # fmt: skip

test_ops = op_test(CASES)


# ---------------------------------------------------------------------- copies that torch would call views
def _go_on_with_the_view(x):
    y = (x * 1.5).view(3, 3, 6)  # moves borders
    y += 1
    y[1].mul_(2)
    return y.transpose(0, 1).reshape(9, 6).relu_()


@distributed(ranks=[2, 3])
def test_a_moved_reshape_may_be_changed_when_its_base_is_not_used_any_more():
    for sizes in ("uneven", "empty"):
        assert_parity(_go_on_with_the_view, torch.randn(9, 6), 0, sizes)


@distributed(ranks=3)
def test_reading_the_base_of_a_changed_copy_is_refused():
    base = _cut(_numbers(9, 6), sizes=(4, 0, 5)) * 1
    base.view(3, 3, 6)[0].mul_(2)
    expect_error(lambda: base + 1, ShardError, r"a view of float64\(9, 6\).* was changed in place")
    above = _cut(_numbers(9, 6), sizes=(4, 0, 5)) * 1
    above[:].view(3, 3, 6).zero_()
    expect_error(lambda: above.sum(), ShardError, "was changed in place")
    windows = _cut(_numbers(9, 6), sizes=(4, 0, 5)) * 1
    windows.unfold(0, 2, 2).mul_(2)
    expect_error(lambda: windows.clone(), ShardError, "was changed in place")


@distributed(ranks=3)
def test_reading_a_copy_of_a_changed_base_is_refused():
    base = _cut(_numbers(9, 6), sizes=(4, 0, 5)) * 1
    view, other = base.view(3, 3, 6), base.view(6, 9)
    base.mul_(2)
    expect_error(lambda: view + 1, ShardError, "was changed in place after the view was taken")
    expect_error(lambda: other.sum(), ShardError, "take the view after the change")
    assert torch.equal(base.view(3, 3, 6).full_tensor(), _numbers(3, 3, 6) * 2)


@distributed(ranks=2)
def test_moved_views_in_inference_mode():
    with torch.inference_mode():
        y = _cut(_numbers(9, 6)) * 1
        row = y[3]
        y.mul_(2)
        assert torch.equal(row.full_tensor(), _numbers(9, 6)[3] * 2)
        row.zero_()
        assert torch.equal(y[3:5].full_tensor(), torch.stack([torch.zeros(6).double(), _numbers(9, 6)[4] * 2]))


# ---------------------------------------------------------------------- what torch refuses
@distributed(ranks=3)
def test_errors_of_torch():
    x = _cut(_numbers(7, 3), requires_grad=True)
    expect_error(lambda: x.mul_(2), RuntimeError, "leaf Variable that requires grad")
    expect_error(lambda: x[2:4].mul_(2), RuntimeError, "leaf Variable that requires grad")
    expect_error(lambda: (x * 1).chunk(2)[0].add_(1), RuntimeError, "is a view and is being modified inplace")
    expect_error(lambda: (x * 1).expand(2, 7, 3).add_(torch.ones(3, 7, 3)), RuntimeError, "")
    expect_error(lambda: _cut(torch.ones(7, 3).long()).mul_(0.5), RuntimeError, "can't be cast")


SAVING = {
    "native": torch.exp,
    "matmul": lambda y: y @ torch.ones(3, 3, dtype=torch.float64, requires_grad=True),
    "softmax": lambda y: y.softmax(-1),
    "cut across": lambda y: y * y[:, :1].clone(),
    "plain": lambda y: y * torch.ones(3, dtype=torch.float64, requires_grad=True),
    "layer_norm": lambda y: F.layer_norm(y, (3,)),
}
CHANGES = [
    lambda y, z: y.mul_(2),
    lambda y, z: y[2:4].zero_(),
    lambda y, z: y[3].zero_(),
    lambda y, z: y.t()[1].mul_(2),
    lambda y, z: operator.setitem(y, 0, 1.0),
    lambda y, z: y.detach()[1:].mul_(2),
    lambda y, z: z.mul_(2),
    lambda y, z: z[1:3].mul_(2),
    lambda y, z: z.detach()[1].zero_(),
]


def _notices(y, save, change) -> bool:
    y = y * 1
    z = save(y)
    change(y, z)
    try:
        z.sum().backward()
    except RuntimeError as error:
        return "modified by an inplace operation" in str(error)
    return False


@pytest.mark.parametrize("saving", SAVING)
@distributed(ranks=2)
def test_a_change_of_what_backward_needs_is_noticed_where_torch_does(saving):
    """Whether autograd saved the tensor itself, or a local op its shard."""
    full = _numbers(7, 3).div_(20).requires_grad_()
    for k, change in enumerate(CHANGES):
        expected = _notices(full, SAVING[saving], change)
        found = _notices(_cut(full.detach(), sizes=(5, 2), requires_grad=True), SAVING[saving], change)
        assert found == expected, f"change {k}"


@distributed(ranks=2)
def test_changes_of_metadata_are_refused_before_anything_is_sent():
    x = _cut(_numbers(7, 3))
    calls = [("t_", ()), ("unsqueeze_", (0,)), ("squeeze_", ()), ("transpose_", (0, 1)), ("resize_", (2, 2))]
    for name, arguments in calls:
        expect_error(lambda n=name, a=arguments: getattr(x, n)(*a), MissingShardPatch, name)
    assert x.shape == (7, 3)


@distributed(ranks=2)
def test_a_plain_target_takes_whole_values():
    full = _numbers(7, 3)
    x, plain = _cut(full), torch.zeros(7, 3, dtype=torch.float64)
    assert plain.add_(x) is plain
    assert plain.copy_(x) is plain
    plain += x
    plain[2:4] = x[2:4]
    plain.index_add_(0, torch.tensor([0, 1]), x[5:])
    expected = full * 2
    expected[2:4] = full[2:4]
    expected[:2] += full[5:]
    assert torch.equal(plain, expected)
    assert type(plain) is Tensor


@distributed(ranks=2)
def test_version_counter_and_identity():
    y = _cut(_numbers(7, 3)) * 1
    before, same = y._version, y
    y += 1
    assert y is same
    y[3].zero_()
    assert y._version == before + 2


class _Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.act = nn.Sequential(nn.LeakyReLU(0.1, inplace=True), nn.Dropout(0.5, inplace=True))

    def forward(self, x):
        y = self.act(self.first(x)) * 1
        y += x
        y[:, :2] *= 0.5
        y[0] = self.second(y[1].clone())
        return F.silu(y, inplace=True)


@distributed(ranks=[2, 3])
def test_a_module_with_inplace_layers():
    for sizes in ("even", "uneven", "empty"):
        assert_parity(_Block().eval(), torch.randn(9, 6), 0, sizes, strict=True)
