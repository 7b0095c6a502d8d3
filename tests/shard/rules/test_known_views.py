"""Views of a kind met before: their plan is found as the call was written, and must not answer another call."""

import pytest
import torch

import dpzoo
from dpzoo.shard.moved_view import CopiedView
from dpzoo.testing import distributed, domain_mesh, layout_sizes

CALLS = {
    "view": lambda x: (x.view(3, 8, 2, 2), x.view(3, 8, 4), x.view((3, 8, 2, 2)), x.view([3, 8, 1, 4])),
    "reshape": lambda x: (x.reshape(3, 8, 2, 2), x.reshape(-1, 8, 4), x.reshape(24, 4), x.mT.reshape(12, 8)),
    "permute": lambda x: (x.permute(2, 0, 1), x.permute(1, 0, 2), x.permute(-1, 0, 1), x.permute((0, 2, 1))),
    "transpose": lambda x: (x.transpose(0, 1), x.transpose(1, 2), x.transpose(-1, 0), x.mT.transpose(0, 1)),
    "unbind": lambda x: (*x.unbind(0), *x.unbind(2), *x.unbind(-1), *x.unbind(1)),
    "ones": lambda x: (x.unsqueeze(0), x.unsqueeze(1).squeeze(1), x.unsqueeze(-1), x.unsqueeze(1).expand(3, 2, 8, 4)),
    "heads": lambda x: x.reshape(3, 8, 2, 1, 2).permute(2, 0, 3, 1, 4).unbind(0),
}


@distributed(ranks=3)
@pytest.mark.parametrize("layout", ["even", "uneven", "empty"])
def test_the_third_call_gives_what_the_first_gave(layout):
    mesh = domain_mesh()
    for name, call in CALLS.items():
        for dtype in (torch.float64, torch.float32, torch.float64):
            full = torch.arange(96, dtype=dtype).view(3, 8, 4)
            for grad in (True, False):
                x = dpzoo.scatter(full, mesh, dim=1, sizes=layout_sizes(8, mesh.size(), layout)).requires_grad_(grad)
                plain = full.clone().requires_grad_(grad)
                outs, wanted = call(x), call(plain)
                for a, b in zip(outs, wanted, strict=True):
                    assert a.dtype is dtype and torch.equal(a.full_tensor(), b), (name, dtype)
                if grad:
                    sum((o * o).sum() for o in outs).backward()
                    sum((o * o).sum() for o in wanted).backward()
                    assert torch.equal(x.grad.full_tensor(), plain.grad), (name, dtype)


@distributed(ranks=2)
def test_views_of_views_that_moved_are_not_taken_for_aligned_ones():
    """A row of a cut dim is a copy that writes home; a view of it has the layout of one that needs no such care."""
    mesh = domain_mesh()
    for apart in (False, True, False, True):
        full = torch.arange(24.0).view(4, 6)
        x = dpzoo.scatter(full, mesh, dim=0, sizes=(3, 1))
        base = x[3] if apart else dpzoo.scatter(full[3].clone(), mesh, dim=None)
        for view in (lambda t: t.view(2, 3), lambda t: t.unsqueeze(0), lambda t: t.unsqueeze(1).unbind(1)[0]):
            view(base).mul_(2)
        assert torch.equal(base.full_tensor(), full[3] * 8)
        assert torch.equal(x.full_tensor(), torch.cat([full[:3], full[3:] * 8]) if apart else full)


@distributed(ranks=2)
def test_a_write_through_a_known_view_counts():
    """What autograd has saved notices the write, the first time and later."""
    mesh = domain_mesh()
    for _ in range(3):
        x = dpzoo.scatter(torch.ones(4, 6), mesh, dim=0)
        w = dpzoo.scatter(torch.ones(4, 6), mesh, dim=0).requires_grad_()
        loss = (x * w).sum()
        with torch.no_grad():
            x.view(4, 2, 3).transpose(0, 1).add_(1)
        assert torch.equal(x.full_tensor(), torch.full((4, 6), 2.0))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@distributed(ranks=2)
def test_a_reshape_of_one_cut_is_not_taken_for_that_of_another():
    """Where dim 0 is cut nothing moves; where dim 1 is, rows move first, above autograd."""
    mesh, full = domain_mesh(), torch.randn(4, 6, 2)
    for _ in range(2):
        assert not isinstance(dpzoo.scatter(full, mesh, dim=0).reshape(24, 2), CopiedView)
        moved = dpzoo.scatter(full, mesh, dim=1).reshape(24, 2)
        assert isinstance(moved, CopiedView) and torch.equal(moved.full_tensor(), full.reshape(24, 2))
