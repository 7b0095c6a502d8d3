"""A mesh that was built twice is one mesh: its tensors meet in any op. Each keeps its own groups."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from dpzoo.shard import LayoutError, scatter
from dpzoo.shard.mesh import MeshLayout
from dpzoo.testing import distributed, domain_mesh, expect_error

CALLS = {
    "pointwise": lambda x, y: x + y.sin(),
    "in place": lambda x, y: (x * 1).mul_(y),
    "cat": lambda x, y: torch.cat([x, y]),
    "sum over ranks": lambda x, y: x.mT @ y,
    "cdist": lambda x, y: torch.cdist(x, y),
    "attention": lambda x, y: F.scaled_dot_product_attention(x[None], y[None], y[None]),
    "gather": lambda x, y: x.gather(0, (y > 0).long()),
    "mask": lambda x, y: x[y[:, 0] > 0],
    "loss": lambda x, y: F.mse_loss(x, y),
    "layer norm": lambda x, y: F.layer_norm(x, (4,), y.sum(0)),
    "list": lambda x, y: torch._foreach_add([x, y], [y, x])[1],
    "redistribute": lambda x, y: x.redistribute(y.device_mesh, [Shard(1)]) * y if hasattr(x, "_spec") else x * y,
}


def twice():
    """The second line of a (2, 2) mesh, that is ranks 2 and 3 on those ranks, built twice."""
    return [init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "domain"))["domain"] for _ in range(2)]


@distributed(ranks=4)
def test_tensors_of_equal_meshes_meet():
    one, two = twice()
    assert MeshLayout.of(one) is not MeshLayout.of(two)  # two threads may use them side by side
    assert MeshLayout.of(one).equals(MeshLayout.of(two))
    torch.manual_seed(0)
    full = [torch.randn(9, 4, dtype=torch.float64) for _ in range(2)]
    first = dist.get_rank() // 2 * 2
    for name, call in CALLS.items():
        for sizes in ((4, 5), (9, 0)):
            x, y = (t.clone().requires_grad_() for t in full)
            a = scatter(full[0], one, sizes=sizes, src=first).requires_grad_()
            b = scatter(full[1], two, sizes=(5, 4), src=first).requires_grad_()
            expected, found = call(x, y), call(a, b)
            torch.testing.assert_close(found.full_tensor(), expected, msg=lambda m, n=name: f"{n}: {m}")
            for out in (expected, found):
                (out * out.detach().cos()).sum().backward()
            for t, g in ((x, a.grad), (y, b.grad)):
                if t.grad is not None:
                    torch.testing.assert_close(g.full_tensor(), t.grad, msg=lambda m, n=name: f"{n}: {m}")
            assert a.device_mesh is one and b.device_mesh is two


@distributed(ranks=4)
def test_meshes_of_other_ranks_or_names_stay_apart():
    one, other = domain_mesh(), init_device_mesh("cpu", (4,), mesh_dim_names=("rows",))
    line, column = (init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "domain"))[name] for name in ("domain", "a"))
    x = scatter(torch.ones(8, 3), one)
    for mesh in (other, line, column):
        y = scatter(torch.ones(8, 3), mesh, src=int(mesh.mesh.flatten()[0]))
        expect_error(lambda y=y: x + y, LayoutError, "different meshes")
        with pytest.raises(LayoutError, match="redistribute cannot change the mesh"):
            x.redistribute(mesh, [Shard(1)])
