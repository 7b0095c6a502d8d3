"""parallelize: what it makes of a model and a mesh, what it promises about gradients, and what it refuses."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dpzoo.parallel import parallelize
from dpzoo.parallel.ddp import FlatDataParallel
from dpzoo.shard import LayoutError, ShardError, grad_sync
from dpzoo.shard.traffic import count_traffic
from dpzoo.testing import distributed, domain_mesh, expect_error, grid_mesh
from tests.parallel.small_net import Net, cut, loss_of, meshes, sample, trained_together, whole


# ---------------------------------------------------------------------- what comes back
@distributed(ranks=4)
def test_wrappers():
    grid, alone = grid_mesh(), domain_mesh()
    net = Net()
    assert parallelize(net, alone) is net and not isinstance(net, DistributedDataParallel)
    wrapped = parallelize(Net(), grid)
    assert type(wrapped) is FlatDataParallel and wrapped.process_group.size() == 4
    wrapped = parallelize(Net(), grid, reduction="domain", bucket_cap_mb=1)
    assert type(wrapped) is DistributedDataParallel and wrapped.process_group is grid["ddp"].get_group()
    net = Net()
    assert parallelize(net, grid, strategy="fsdp") is net and isinstance(net, FSDPModule)
    # blocks[0] shares a weight with the head
    assert [isinstance(b, FSDPModule) for b in net.blocks] == [False, True, True]
    assert all(isinstance(p, DTensor) and p.device_mesh.size() == 4 for p in net.parameters())
    net = parallelize(Net(), grid, strategy="fsdp", reduction="domain", units=lambda name, m: name == "blocks.2")
    assert [isinstance(b, FSDPModule) for b in net.blocks] == [False, False, True]
    assert all(p.device_mesh is grid["ddp"] or p.device_mesh == grid["ddp"] for p in net.parameters())
    assert net.head.weight is net.blocks[0].fc.weight
    named = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "rows"))
    assert parallelize(Net(), named, ddp_axis="copies", domain_axis=("rows", "columns")).process_group.size() == 4


@distributed(ranks=4)
def test_all_start_from_the_first_or_verify():
    rank = dist.get_rank()
    for mesh in (grid_mesh(), domain_mesh()):
        for strategy in ("ddp", "fsdp"):
            net = Net(seed=rank)
            net.register_buffer("table", torch.full((3,), float(rank)))
            wrapped = parallelize(net, mesh, strategy=strategy)
            wanted = Net(seed=0)
            for (name, p), want in zip(wrapped.named_parameters(), wanted.parameters(), strict=True):
                assert torch.equal(whole(p), want.detach()), name
            assert net.table.sum() == 0
        expect_error(
            lambda m=mesh: parallelize(Net(seed=rank // 3), m, verify=True), ShardError, r"differ .*stem\.bias"
        )
        parallelize(Net(), mesh, verify=True)


@distributed(ranks=4, timeout=100)
def test_replicas_stay_equal_to_the_bit():
    """Also where an axis has one rank: sharding over it must not lose the other axis' reduction."""
    for strategy, reduction, name in [
        ("ddp", "flat", "2x2"),
        ("ddp", "domain", "2x2"),
        ("fsdp", "domain", "2x2"),
        ("fsdp", "domain", "1x4"),
        ("fsdp", "flat", "1x4"),
        ("fsdp", "flat", "4x1"),
    ]:
        mesh = meshes()[name]
        wrapped = parallelize(Net(), mesh, strategy=strategy, reduction=reduction, **_finding(strategy))
        trained_together(wrapped, mesh, 1, steps=3)
        mine = [whole(p) for p in wrapped.parameters()]
        everyone = [None] * 4
        dist.all_gather_object(everyone, mine)
        assert all(torch.equal(a, b) for other in everyone for a, b in zip(mine, other, strict=True)), (strategy, name)
        start = Net()
        assert any(not torch.equal(a, b) for a, b in zip(mine, start.parameters(), strict=True))


def _finding(strategy):
    return {"find_unused_parameters": True} if strategy == "ddp" else {}


# ---------------------------------------------------------------------- gradients in the flat mode
@distributed(ranks=4)
def test_flat_gradients_are_whole_for_all_who_look():
    """Hooks, autograd.grad, tensors that are no weights of the model, and calls past the wrapper."""
    mesh = grid_mesh()
    replica, domain = mesh.get_local_rank("ddp"), mesh["domain"]

    def run(net, x, scale, found):
        hook = net.head.bias.register_hook(lambda g: found.update(hook=g.clone()))
        (loss_of(net(x) * scale)).backward()
        hook.remove()
        found["scale"] = scale.grad.clone()
        found["asked"] = torch.autograd.grad(loss_of(net(x)), net.blocks[2].fc.weight)[0]

    class Scaled(nn.Module):
        """The wrapped model with a tensor of somebody else inside its forward."""

        def __init__(self):
            super().__init__()
            self.net = Net()

        def forward(self, x, scale):
            return self.net(x) * scale

    alone, wanted, found = Net(), {}, {}
    scale = sample(1, (4,)).requires_grad_(True)
    run(alone, sample(replica).requires_grad_(True), scale, wanted)

    wrapped = parallelize(Scaled(), mesh, find_unused_parameters=True)
    inner, scale, x = wrapped.module.net, sample(1, (4,)).requires_grad_(True), cut(sample(replica), domain)
    hook = inner.head.bias.register_hook(lambda g: found.update(hook=g.clone()))
    loss_of(wrapped(x, scale)).backward()
    hook.remove()
    found["scale"] = scale.grad.clone()
    one = torch.ones(4, dtype=torch.float64)
    found["asked"] = torch.autograd.grad(loss_of(wrapped(x, one)), inner.blocks[2].fc.weight)[0]
    assert wanted.keys() == found.keys()
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
    _past_the_wrapper(mesh)
    _on_other_groups()


def _past_the_wrapper(mesh):
    """Without the wrapper's forward nobody averages, so the domain sums."""
    replica, domain = mesh.get_local_rank("ddp"), mesh["domain"]
    alone, wrapped = Net(), parallelize(Net(), mesh)
    loss_of(alone(sample(replica))).backward()
    loss_of(wrapped.module(cut(sample(replica), domain))).backward()
    for (name, p), want in zip(wrapped.module.named_parameters(), alone.parameters(), strict=True):
        assert (p.grad is None) == (want.grad is None), name
        if want.grad is not None:
            torch.testing.assert_close(p.grad, want.grad, rtol=1e-10, atol=1e-12)


def _on_other_groups():
    """Nobody promised anything about a mesh that is not the model's, even if it has the same ranks."""
    mesh, other = grid_mesh(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "domain"))
    assert mesh["domain"].get_group().group_name != other["domain"].get_group().group_name
    alone, wrapped = Net(), parallelize(Net(), mesh, find_unused_parameters=True)
    for replica in range(2):
        (loss_of(alone(sample(replica))) / 2).backward()
    loss_of(wrapped(cut(sample(mesh.get_local_rank("ddp")), other["domain"]))).backward()
    for name, want in alone.named_parameters():
        if want.grad is not None:
            torch.testing.assert_close(wrapped.module.get_parameter(name).grad, want.grad, rtol=1e-10, atol=1e-12)


@distributed(ranks=4)
def test_flat_reduces_once():
    """The domain communicates for activations alone; `grad_sync("eager")` around the forward brings its sums back."""
    mesh = grid_mesh()
    x = cut(sample(mesh.get_local_rank("ddp")), mesh["domain"])
    for strategy in ("ddp", "fsdp"):
        counts = {}
        for name in ("flat", "domain", "eager"):
            reduction = "flat" if name == "eager" else name
            net = parallelize(Net(), mesh, strategy=strategy, reduction=reduction, **_finding(strategy))
            with grad_sync("eager" if name == "eager" else "bucket"), count_traffic() as seen:
                loss_of(net(x)).backward()
            counts[name] = seen.calls
        weights = sum(p.requires_grad for n, p in Net().named_parameters() if not n.startswith("unused"))
        assert counts["eager"] >= counts["flat"] + weights - 1, (strategy, counts, weights)
        # Weights of DDP wait for each other (`gradients.lent`): one sum, and one gather of the slices of the position
        # embedding's gradient. FSDP2 takes each gradient as it comes.
        assert counts["domain"] == (counts["flat"] + 2 if strategy == "ddp" else counts["eager"]), (strategy, counts)


# ---------------------------------------------------------------------- buffers and memory orders
class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1)).double()

    def forward(self, x):
        return self.body(x)


@distributed(ranks=4)
def test_buffers_follow_the_first_replica():
    """FSDP2 leaves buffers alone; here they go the way of DDP: the statistics of the first replica."""
    mesh = grid_mesh()
    replica, domain = mesh.get_local_rank("ddp"), mesh["domain"]
    found = {}
    for strategy in ("ddp", "fsdp"):
        net = Normed()
        wrapped = parallelize(net, mesh, strategy=strategy)
        for step in range(2):
            loss_of(wrapped(cut(sample(10 * step + replica), domain))).backward()
        wrapped.eval()
        found[strategy] = {n: b.clone() for n, b in net.named_buffers()}
    alone = Normed()
    for step in range(2):
        alone(sample(10 * step))
    for name, want in alone.named_buffers():
        torch.testing.assert_close(found["fsdp"][name], found["ddp"][name], rtol=1e-12, atol=1e-12)
        if replica == 0:
            torch.testing.assert_close(found["ddp"][name], want, rtol=1e-10, atol=1e-12)


class Odd(Normed):
    """Weights and buffers in every memory order, one that overlaps itself."""

    def __init__(self):
        super().__init__()
        self.body = self.body.to(memory_format=torch.channels_last)
        self.mix = nn.Parameter(torch.randn(2, 2, dtype=torch.float64).t())
        self.every_second = nn.Parameter(torch.randn(2, 4, dtype=torch.float64)[:, ::2])
        self.spread = nn.Parameter(torch.ones(1, 1, dtype=torch.float64).expand(2, 2))
        self.register_buffer("table", torch.ones(1, dtype=torch.float64).expand(2))

    def forward(self, x):
        x = super().forward(x).permute(0, 2, 3, 1)
        return x @ self.mix @ self.every_second @ self.spread * self.table


@distributed(ranks=4)
def test_memory_orders():
    mesh = grid_mesh()
    replica, domain = mesh.get_local_rank("ddp"), mesh["domain"]
    alone = Odd().eval()
    alone.spread.data = alone.spread.data.contiguous()
    sum(loss_of(alone(sample(r))) / 2 for r in range(2)).backward()
    for strategy in ("ddp", "fsdp"):
        net = Odd().eval()
        kept = dict(net.named_parameters())
        wrapped = parallelize(net, mesh, strategy=strategy)
        loss_of(wrapped(cut(sample(replica), domain))).backward()
        for name, p in net.named_parameters():
            want = dict(alone.named_parameters())[name]
            torch.testing.assert_close(whole(p.grad), want.grad, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: n + m)
            assert strategy == "fsdp" or p is kept[name]
        if strategy == "ddp":
            assert net.body[0].weight.is_contiguous(memory_format=torch.channels_last)


# ---------------------------------------------------------------------- refusals
@distributed(ranks=4)
def test_refusals():
    grid, line = grid_mesh(), domain_mesh()
    for net, error, words in [
        (FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu")), ShardError, "FSDP1 .*fully_shard"),
        (DistributedDataParallel(nn.Linear(2, 2)), ShardError, "wrapped already .DistributedDataParallel"),
        (nn.Sequential(fully_shard(nn.Linear(2, 2), mesh=line)), ShardError, "module '0' is wrapped already"),
        (nn.Linear(2, 2, device="meta"), ShardError, "weight is on the meta device"),
    ]:
        expect_error(lambda n=net: parallelize(n, grid), error, words)
    for arguments, error, words in [
        ({"strategy": "fsdp1"}, ValueError, "FSDP1 is not supported: it keeps the weights"),
        ({"strategy": "zero"}, ValueError, "strategy='zero': take one of 'ddp', 'fsdp'"),
        ({"reduction": "late"}, ValueError, "reduction='late'"),
        ({"spatial": {"weight": 0}}, ValueError, "spatial= and units= are for strategy='fsdp'"),
        ({"ddp_axis": "copies"}, LayoutError, "axes .* are named .'ddp', 'domain'.; each must be one of"),
        ({"domain_axis": ("ddp", "domain")}, LayoutError, "each must be one of"),
        ({"strategy": "fsdp", "spatial": {"pos*": 0}}, LayoutError, r"no parameter or buffer fits \['pos\*'\]"),
        ({"strategy": "fsdp", "spatial": {"weight": 2}}, LayoutError, r"weight has shape \(2, 2\); the dims 2 must be"),
    ]:
        expect_error(lambda a=arguments: parallelize(nn.Linear(2, 2), grid, **a), error, words)
    fsdp = {"strategy": "fsdp", "reduction": "domain"}
    expect_error(lambda: parallelize(nn.Linear(2, 2), line, **fsdp), LayoutError, "no data-parallel axis")
    expect_error(lambda: parallelize(nn.Linear(2, 2), None), LayoutError, "needs a torch DeviceMesh")
    named = init_device_mesh("cpu", (4,), mesh_dim_names=("ddp",))
    words = "no domain axis to shard parameters over"
    expect_error(
        lambda: parallelize(nn.Linear(2, 2), named, strategy="fsdp", spatial={"weight": 0}), LayoutError, words
    )
