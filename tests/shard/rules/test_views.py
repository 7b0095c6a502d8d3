"""Views of sharded tensors: values, gradients, memory shared with the base, and no communication where none is due."""

import pytest
import torch

import dpzoo
from dpzoo.shard import ShardError, ShardTensor
from dpzoo.testing import distributed, domain_mesh, layout_sizes, op_test
from tests.shard.counting import count_collectives
from tests.shard.rules.inputs import raises_like_torch
from tests.shard.rules.rows import SHAPE, case, everywhere


def orders(x):
    """All ways to renumber dims."""
    return [
        x.permute(2, 0, 1), x.permute((1, -1, 0)), torch.permute(x, dims=(0, 2, 1)), x.transpose(0, 1),
        torch.transpose(x, dim0=-1, dim1=0), x.swapaxes(1, 2), x.swapdims(0, 2), x.movedim(1, 0),
        torch.moveaxis(x, (0, 1), (2, 0)),
        x.mT, x.permute(2, 1, 0), x.adjoint(), x[0].T, x[0].t(), x[:, 0].H, x[0, 0].t(),
    ]  # fmt: skip


def ones_in_and_out(x):
    """unsqueeze, squeeze, expand."""
    wide = x.unsqueeze(1)
    return [
        x.unsqueeze(0), x.unsqueeze(-1), torch.unsqueeze(x, dim=2), wide.squeeze(1), wide.squeeze(),
        torch.squeeze(wide, dim=(1, 2)),
        x.squeeze(), x.squeeze(0), wide.squeeze(-3), x[None, ..., None].squeeze((0, -1)), x.expand(2, -1, -1, -1),
        wide.expand(3, 5, 7, 4), x.expand(3, 7, 4), x.broadcast_to(2, 3, 7, 4), x[:, :1].expand(-1, 6, -1),
        x[:1].expand_as(x),
        torch.broadcast_tensors(x, x[:, :1], x[0])[1], x[1:2, 3:4].squeeze(1), torch.atleast_3d(x[0])[0],
        torch.atleast_2d(x[0, 0]),
        torch.atleast_1d(x[0, 0, 0]), torch.atleast_1d([x[0], x[0, 0, 0]])[1],
    ]  # fmt: skip


def parts(x):
    """split, chunk, unbind, narrow, select, in every spelling and along every dim."""
    return [
        x.split(2, 1), x.split([1, 0, 6], 1), torch.split(x, split_size_or_sections=3, dim=-1), x.chunk(3, 1),
        torch.chunk(x, 2, dim=0),
        x.chunk(9, 1), x.unbind(1), x.unbind(), torch.unbind(x, dim=-1), x.narrow(1, 2, 4), torch.narrow(x, 0, 1, 2),
        x.select(1, 3),
        x.select(-1, -1), torch.select(x, dim=0, index=1), x.tensor_split(3, 1), x.tensor_split((1, 5), 1),
        x.hsplit(7), x.vsplit(3),
        x.dsplit([1, 3]), list(x), x.split_with_sizes([3, 4], 1),
    ]  # fmt: skip


def slices(x):
    """Basic indices."""
    return [
        x[1], x[:, 2], x[..., -1], x[:, 2:5], x[:, ::2], x[:, 1::3], x[:, -3:], x[:, 5:2], x[:, :100], x[1, 2, 3],
        x[:, 3, None], x[None],
        x[0, ..., 1:3], x[:, 6:7], x[2:, 1:6:2, ::3], x[...], x[:, 3:4, 0], x[-1, -7],
    ]  # fmt: skip


def diagonals(x):
    return [x.diagonal(k, a, b) for k in (-3, -1, 0, 2, 9) for a, b in ((0, 1), (1, 2), (2, 1), (0, 2), (-1, 0))] + [
        torch.diagonal(x, offset=1, dim1=1, dim2=2),
        x.transpose(0, 1).diagonal(),
        torch.linalg.diagonal(x),
    ]


def windows(x):
    return [x.unfold(d, size, step) for d in (0, 1, -1) for size in (1, 3) for step in (1, 2, 4)] + [x.unfold(1, 7, 1)]


def complex_views(x):
    z = torch.view_as_complex(x.unflatten(2, (2, 2)))
    return (
        torch.view_as_real(z * 1j),
        z.real,
        z.imag,
        torch.view_as_real(z.conj().resolve_conj()),
        z.conj().real,
        z.transpose(0, 1).real,
    )


def some_unused(x):
    """Outputs that nobody uses get no gradient, and cost none."""
    return (
        x.split([2, 4, 1], 1)[1] * 2, x.chunk(3, 1)[0], x.unbind(1)[4], x.unbind(0)[0], torch.split(x, 2, -1)[1],
        x.tensor_split(3, 1)[2],
        x.hsplit(7)[3], next(iter(x)),
    )  # fmt: skip


def in_twos(x):
    """The same rows through several views: their gradients add."""
    a, b = x.chunk(2, 1)
    return a[:, :3] * b[:, :3], x[:, 1:4] + x[:, 2:5], x.t() if x.ndim == 2 else x.mT @ x[:, :, 0, None]


def copies(x):
    return [
        torch.permute_copy(x, (1, 0, 2)), torch.squeeze_copy(x[:, :1], 1), torch.view_copy(x, (3, 7, 2, 2)),
        torch.unbind_copy(x, 1),
        torch.narrow_copy(x, 1, 2, 3), torch.select_copy(x, 1, 2), torch.expand_copy(x[:, :1], (3, 5, 4)),
        torch.alias_copy(x),
        torch.diagonal_copy(x, 0, 1, 2), torch.transpose_copy(x, 0, 1), torch.unsqueeze_copy(x, 1), torch.t_copy(x[0]),
        torch.split_copy(x, 2, 1), torch.split_with_sizes_copy(x, [3, 4], 1), torch.unfold_copy(x, 2, 2, 1),
    ]  # fmt: skip


CASES = [
    everywhere("renumbered dims", orders),
    everywhere("slices", slices, ("getitem", "select")),
    everywhere("parts", parts, ("split", "unbind", "select")),
    case("dims of size 1", ones_in_and_out, ("squeeze", "expand", "atleast_nd", "broadcast_tensors")),
    case(
        "a cut dim of size 1",
        ones_in_and_out,
        ("squeeze", "expand"),
        shape=SHAPE,
        shard=0,
        layouts=((0, 3, 0), (1, 1, 1), "empty"),
    ),
    case(
        "one row",
        lambda x: (x.squeeze(), x.squeeze(1), x.expand(3, 5, 4), x.reshape(12), x.flatten(1), x.unbind(1), x[:, 0]),
        ("squeeze", "expand"),
        shape=(3, 1, 4),
        layouts=("even", "empty_first"),
    ),
    case("diagonals of one cut dim", diagonals, ("diagonal", "linalg.diagonal"), mesh2d=None),
    case(
        "diagonals of the other",
        lambda x: diagonals(x.transpose(1, 2).contiguous().transpose(1, 2)),
        ("diagonal",),
        shard=2,
        mesh2d=None,
    ),
    case("diagonals of two cut dims", diagonals, ("diagonal",), ranks=(), gathers=True),
    case("windows", windows, ("Tensor.unfold",)),
    case("windows of another cut dim", windows, ("Tensor.unfold",), shard=0),
    case("complex views", complex_views),
    case("unused parts", some_unused, ("split", "unbind")),
    case("the same rows twice", in_twos, mesh2d=None),
    case(
        "copies of views",
        copies,
        tuple(
            f"{n}_copy"
            for n in (
                "alias",
                "diagonal",
                "expand",
                "narrow",
                "permute",
                "select",
                "split",
                "split_with_sizes",
                "squeeze",
                "t",
                "transpose",
                "unbind",
                "unfold",
                "unsqueeze",
                "view",
            )
        ),
    ),
    case(
        "copies without a gradient",
        lambda x: (torch.view_as_real_copy(torch.view_as_complex_copy(x.view(3, 7, 2, 2))), torch.detach_copy(x)),
        ("view_as_real_copy", "view_as_complex_copy", "detach_copy"),
        grads=False,
    ),
    case(
        "diag",
        lambda x: (torch.diag(x), x.diag(2), torch.diag(input=x, diagonal=-1)),
        ("diag",),
        shape=(7, 5),
        mesh2d=None,
    ),
    case("diag of a vector", torch.diag, ("diag",), shape=(7,), shard=0, mesh2d=None, gathers=True),
    case(
        "meshgrid",
        lambda x: [*torch.meshgrid(x, x[:3], indexing="ij"), *torch.meshgrid([x, x[:2]], indexing="xy")],
        ("meshgrid",),
        shape=(7,),
        shard=0,
        mesh2d=None,
    ),
    case(
        "another dtype",
        lambda x: (x.view(torch.int64), x.view(torch.int32).view(torch.float64), x.view(dtype=torch.int64)),
        ("reshape",),
        grads=False,
    ),
    case(
        "nothing inside",
        lambda x: (x.permute(2, 0, 1), x[:, :0], x.split(0, 1), x.unsqueeze(1), x.transpose(0, 1)),
        shape=(3, 0, 4),
    ),
    case(
        "second order",
        lambda x: torch.autograd.grad(
            sum(
                (v**3).sum()
                for v in (
                    x[:, 1:5:2],
                    x.unbind(1)[3],
                    x.mT,
                    x.unfold(1, 3, 2),
                    x.diagonal(0, 1, 2),
                    x.split(3, 1)[1],
                    x[:, :1].expand(3, 5, 4),
                )
            ),
            x,
            create_graph=True,
        ),
        mesh2d=None,
    ),
]

test_views = op_test(CASES)


def sharded(full, dim=1, layout="uneven"):
    mesh = domain_mesh()
    return dpzoo.scatter(full, mesh, dim=dim, sizes=layout_sizes(full.shape[dim], mesh.size(), layout))


@distributed(ranks=3)
@pytest.mark.parametrize("layout", ["uneven", "empty"])
def test_aligned_views_communicate_nothing(layout):
    x = sharded(torch.randn(4, 12, 6), layout=layout).requires_grad_()
    with count_collectives() as seen:
        outs = [
            *orders_without_select(x), x[:, 2:7], x[:, ::3], x[..., 1], x[1], x.narrow(1, 3, 6), *x.split(5, 1),
            *x.chunk(3, 2), *x.unbind(2),
            x.unsqueeze(1).squeeze(1), x.expand(2, 4, 12, 6), x.view(4, 12, 2, 3), x.reshape(2, 2, 12, 6),
            x.flatten(0, 0), x.unflatten(2, (3, 2)),
            x.mT.reshape(24, 12), x.transpose(0, 1).flatten(1), x.diagonal(0, 1, 2), x.unfold(2, 2, 2),
            x[None, :, 3:4], x.view_as(x),
        ]  # fmt: skip
        torch.autograd.backward([o.sum(dim=()) if o.ndim == 0 else o for o in outs], [torch.ones_like(o) for o in outs])
    assert seen.calls == 0
    assert x.grad._spec.sizes == x._spec.sizes


def orders_without_select(x):
    return [x.permute(2, 0, 1), x.transpose(0, 1), x.movedim(1, 0), x.mT, x.swapaxes(1, 2)]


@distributed(ranks=3)
def test_shards_of_a_view_share_memory_with_the_base():
    x = sharded(torch.randn(4, 12, 6))
    for view in (x[:, 2:], x.mT, x.view(4, 12, 2, 3), x.unsqueeze(0), x.split(5, 1)[1], x.permute(2, 1, 0)[1:, ::2]):
        local = view._local_tensor
        assert not local.numel() or local.untyped_storage().data_ptr() == x._local_tensor.untyped_storage().data_ptr()


BAD = {
    "no such dim": lambda x: x.transpose(0, 3),
    "not a permutation": lambda x: x.permute(0, 0, 1),
    "index out of range": lambda x: x[:, 7],
    "too many indices": lambda x: x[0, 0, 0, 0],
    "t of a cube": lambda x: x.t(),
    "expand of a long dim": lambda x: x.expand(3, 8, 4),
    "split into wrong sizes": lambda x: x.split([1, 2], 1),
    "split by zero": lambda x: x.split(0, 1),
    "narrow too far": lambda x: x.narrow(1, 5, 4),
    "unsqueeze too far": lambda x: x.unsqueeze(5),
    "window too long": lambda x: x.unfold(1, 8, 1),
    "view of other size": lambda x: x.view(5, 5),
    "view with two unknowns": lambda x: x.view(-1, -1),
    "negative size": lambda x: x.reshape(-2, 42),
    "unflatten of other size": lambda x: x.unflatten(1, (2, 3)),
    "unknown size of nothing": lambda x: x[:, :0].reshape(0, -1),
    "flatten backwards": lambda x: x.flatten(2, 1),
    "select out of range": lambda x: x.select(1, -8),
    "unbind no such dim": lambda x: x.unbind(3),
    "complex of odd size": lambda x: torch.view_as_complex(x),
    "chunk in no parts": lambda x: x.chunk(0, 1),
    "diagonal of one dim": lambda x: x.diagonal(0, 1, 1),
}


@distributed(ranks=2)
@pytest.mark.parametrize("what", sorted(BAD))
def test_where_torch_raises_every_rank_raises_the_same(what):
    raises_like_torch(BAD[what], torch.randn(SHAPE))


@distributed(ranks=2)
def test_gradient_of_a_view_of_a_leaf_has_the_layout_of_the_leaf():
    """Two leaves whose parts lie alike: torch's gradient formula is not told of which leaf a part was."""
    leaves = [sharded(torch.randn(3, 8, 4), layout=layout).requires_grad_() for layout in ("even", "uneven", "empty")]
    for part in (
        lambda x: x[:, 7:],
        lambda x: x.select(1, 3),
        lambda x: x.split([7, 1], 1)[1],
        lambda x: x.diagonal(0, 1, 2),
    ):
        losses = [(part(x) * 2).sum() for x in leaves]
        for x, loss in zip(leaves, losses, strict=True):
            x.grad = None
            loss.backward()
            assert isinstance(x.grad, ShardTensor)
            assert x.grad._spec.sizes == x._spec.sizes


@distributed(ranks=2)
@pytest.mark.parametrize("layout", ["uneven", "empty"])
def test_writing_into_a_view_reaches_the_base_or_is_refused(layout):
    """Never a base that keeps its old values without a word."""
    full = torch.randn(4, 6, dtype=torch.float64)
    views = {
        "slice": lambda y: y[1:3],
        "step": lambda y: y[::2, 1:],
        "row of a cut dim": lambda y: y[1],
        "column": lambda y: y[:, 1],
        "transposed": lambda y: y.t(),
        "aligned": lambda y: y.unflatten(1, (2, 3)),
        "moved": lambda y: y.view(2, 2, 6),
        "diagonal": lambda y: y.diagonal(),
        "windows": lambda y: y.unfold(0, 2, 2),
        "complex": lambda y: torch.view_as_real(torch.view_as_complex(y.view(4, 3, 2))),
        "chain": lambda y: y.unsqueeze(0)[0].t()[2:4],
    }
    for name, view in views.items():
        expected, found = _after_write(full.clone(), view), _after_write(sharded(full, 0, layout), view)
        if found is not None:
            for a, b in zip(expected, found, strict=True):
                torch.testing.assert_close(b, a, msg=f"{name}: {b} is not {a}")
        else:
            assert name in ("moved", "windows"), name


def _after_write(x, view):
    """The base, the view and the gradient after a write into the view; None where that is refused."""
    x.requires_grad_()
    y = x * 1
    part = view(y)
    try:
        part.mul_(3)
        ((y * y).sum() + part.sum()).backward()
        return [t.full_tensor().detach() if isinstance(t, ShardTensor) else t.detach() for t in (y, part, x.grad)]
    except ShardError:
        return None
