"""Gradients of plain tensors: complete on every rank when backward() returns, whatever reads them and whenever."""

import copy
import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from dpzoo.shard import Replicate, Shard, ShardTensor, backward_order, grad_sync, gradient_buckets, scatter_tensor
from dpzoo.shard.traffic import count_traffic
from dpzoo.testing import distributed, domain_mesh, grid_mesh

ROWS = 7


def sample(*shape, seed=5):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mlp(seed=1):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.LayerNorm(6), nn.Linear(6, 4)).double()


def cut(full, sizes=None, mesh=None, requires_grad=False, dim=0):
    mesh = mesh or domain_mesh()
    if sizes is None:
        sizes = {1: (ROWS,), 2: (6, 1), 3: (2, 0, 5)}[mesh.size()]
    return scatter_tensor(
        full, mesh.mesh.flatten()[0].item(), mesh, [Shard(dim)], sizes={0: sizes}, requires_grad=requires_grad
    )


def grads(model):
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, want in wanted.items():
        got = found[name]
        assert (got is None) == (want is None), name
        if want is not None:
            assert type(got) in (torch.Tensor, nn.Parameter) and got.dtype is want.dtype and got.shape == want.shape
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


def both(step, make=mlp, rounds=1):
    """Run `step(model, x)` on the whole and on the shards, and compare the gradients of the model."""
    results = []
    for x in (sample(ROWS, 4), cut(sample(ROWS, 4))):
        model = make()
        for _ in range(rounds):
            step(model, x)
        results.append(grads(model))
    same(results[1], results[0])
    assert any(g is not None and g.abs().sum() > 0 for g in results[0].values())


def plain_loss(model, x):
    (model(x) ** 2).sum().backward()


# ---------------------------------------------------------------------- once, twice, in parts
@pytest.mark.parametrize("mode", ["bucket", "eager", "flat"])
@distributed(ranks=[1, 2, 3])
def test_complete_when_backward_returns(mode):
    with grad_sync(mode):  # flat: no wrapper has promised anything
        both(plain_loss)


@distributed(ranks=3)
def test_small_buckets_are_the_same():
    before, gradient_buckets.BUCKET_BYTES = gradient_buckets.BUCKET_BYTES, 64
    try:
        both(plain_loss, rounds=2)
    finally:
        gradient_buckets.BUCKET_BYTES = before


@distributed(ranks=2)
def test_modes():
    with pytest.raises(ValueError, match="'bucket', 'eager' or 'flat', got 'late'"), grad_sync("late"):
        pass


@distributed(ranks=3)
def test_accumulation_over_several_passes():
    both(plain_loss, rounds=3)

    def zeroed(model, x):
        plain_loss(model, x)
        model.zero_grad(set_to_none=False)
        plain_loss(model, x)

    both(zeroed, rounds=2)


@distributed(ranks=2)
def test_accumulation_adds_into_the_tensor_that_is_there():
    model = mlp()
    model.zero_grad(set_to_none=False)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    held = [p.grad for p in model.parameters()]
    plain_loss(model, cut(sample(ROWS, 4)))
    assert all(p.grad is h and h.abs().sum() > 0 for p, h in zip(model.parameters(), held, strict=True))


@distributed(ranks=3)
def test_two_losses():
    def two(model, x):
        y = model(x)
        y.sum().backward(retain_graph=True)
        (y**2).mean().backward()

    def at_once(model, x):
        y = model(x)
        torch.autograd.backward([y.sum(), (y**2).mean()])

    both(two)
    both(at_once)


@distributed(ranks=3)
def test_a_weight_of_two_layers():
    def shared():
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
        model[2].weight = model[0].weight
        return model

    def make():
        torch.manual_seed(3)
        return shared()

    both(plain_loss, make, rounds=2)


@distributed(ranks=3)
def test_plain_and_sharded_uses_of_one_weight():
    """A weight-decay term is whole on every rank and must not be summed; the rest must."""

    def decayed(model, x):
        loss = (model(x) ** 2).sum()
        for p in model.parameters():
            loss = loss + 0.1 * (p**2).sum()
        loss.backward()

    def apart(model, x):
        ((model(x) ** 2).sum() + 0.5).backward()
        sum((p**3).sum() for p in model.parameters()).backward()

    both(decayed, rounds=2)
    both(apart, rounds=2)


@distributed(ranks=2)
def test_frozen_and_unused_weights():
    def make():
        model = mlp()
        model[0].weight.requires_grad_(False)
        model[3].bias.requires_grad_(False)
        model.unused = nn.Linear(2, 2).double()
        return model

    def step(model, x):
        (model[:4](x) ** 2).sum().backward()

    both(step, make)


@distributed(ranks=3)
def test_weights_that_are_computed():
    def make():
        torch.manual_seed(2)
        return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 5)), nn.Linear(5, 4)).double()

    both(plain_loss, make)

    def scaled(model, x):
        y = nn.functional.linear(x, model[0].weight * 2, model[0].bias.exp())
        (y * model[2].weight.sum()).sum().backward()

    both(scaled)


class Placed(nn.Module):
    """A table with an entry for each place, held in another shape than that in which it is used."""

    def __init__(self):
        super().__init__()
        self.table, self.inner = nn.Parameter(torch.randn(1, 2 * ROWS, 2)), nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x + self.table.view(ROWS, 4)) * self.table.squeeze(0).view(ROWS, 4)


def placed():
    torch.manual_seed(6)
    return Placed().double()


@distributed(ranks=[2, 3])
def test_views_of_weights(ranks):
    both(plain_loss, placed, rounds=2)

    def mixed(model, x):
        (model(x).square().sum() + model.table.square().sum() + (x * model.table.sum()).sum()).backward()

    both(mixed, placed, rounds=2)


@distributed(ranks=2)
def test_a_view_of_a_weight_waits_till_the_end():
    """Its slices are gathered while backward goes on; the node of the view has nothing to hand on."""
    model, x, seen = placed(), cut(sample(ROWS, 4)), []
    view = model.table.view(ROWS, 4)
    loss = ((x + view) * model.inner.bias).square().sum()
    view.grad_fn.register_prehook(lambda grads: seen.append(grads[0]))
    with count_traffic() as traffic:
        loss.backward()
    assert seen == [None] and traffic.calls == 2  # a gather, and a sum for the bias
    whole = (sample(ROWS, 4) + model.table.detach().view(ROWS, 4)) * model.inner.bias.detach().square() * 2
    torch.testing.assert_close(model.table.grad, whole.view(model.table.shape))


@distributed(ranks=3)
def test_who_reads_the_gradient_of_a_view_of_a_weight_sees_all_of_it():
    found = []
    for x in (sample(ROWS, 4), cut(sample(ROWS, 4))):
        weight, hooked = sample(4 * ROWS, seed=2).requires_grad_(True), []
        kept, early, late, other = (weight.view(ROWS, 4) for _ in range(4))
        kept.retain_grad()
        early.register_hook(lambda g, h=hooked: h.append(g.clone()))
        loss = (((x * kept + early) * late).exp() * other).mean()
        late.register_hook(lambda g, h=hooked: h.append(g.clone()))
        asked = torch.autograd.grad(loss, [weight, other], retain_graph=True)
        hooked.clear()
        loss.backward(inputs=[other, weight], retain_graph=True)
        only, weight.grad = weight.grad, None
        hooked.clear()
        del late, early
        loss.backward()
        parts = {"asked": asked[0], "other": asked[1], "kept": kept.grad, "only": only, "all": weight.grad}
        found.append({**parts, **{f"hook {i}": g for i, g in enumerate(hooked)}})
        assert len(hooked) == 2
    same(found[1], found[0])


class Modulated(nn.Module):
    """Rows scaled and shifted by what a layer computes from a condition."""

    def __init__(self):
        super().__init__()
        self.condition, self.inner = nn.Linear(3, 8), nn.Linear(4, 4)

    def forward(self, x, condition):
        scale, shift = self.condition(condition).chunk(2)
        y = nn.functional.layer_norm(self.inner(x), (4,), scale, shift) * scale
        return y + shift * scale  # a plain term: mixes with the parts on the way to the weights


def modulated():
    torch.manual_seed(3)
    return Modulated().double()


def replicated(t, like):
    """A plain tensor as a ShardTensor that every rank of the mesh of another holds."""
    mesh = like.device_mesh if isinstance(like, ShardTensor) else None
    return t if mesh is None else ShardTensor.from_local(t, mesh, [Replicate()] * mesh.ndim)


@pytest.mark.parametrize("mode", ["bucket", "eager", "flat"])
@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("whole", [False, True])
@distributed(ranks=[2, 3])
def test_modulations(mode, small, whole):
    """Parts of tensors that are not leaves wait for each other; what reads their gradients sees the whole."""
    seen, fixed = [], sample(3, seed=8)
    before = gradient_buckets.BUCKET_BYTES
    gradient_buckets.BUCKET_BYTES = 40 if small else before

    def step(model, x):
        condition = fixed.clone().requires_grad_(True)
        y = model(x, replicated(condition, x) if whole else condition)
        (y**2).sum().backward(retain_graph=True)
        y.sum().backward()
        seen.append(condition.grad)

    try:
        with grad_sync(mode):
            both(step, modulated, rounds=2)
    finally:
        gradient_buckets.BUCKET_BYTES = before
    for got, want in zip(seen[2:], seen[:2], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("whole", [False, True])
@distributed(ranks=3)
def test_who_reads_the_gradient_of_a_modulation_sees_all_of_it(whole):
    found = []
    for x in (sample(ROWS, 4), cut(sample(ROWS, 4))):
        weight = sample(4, seed=2)
        weight = (replicated(weight, x) if whole else weight).detach().requires_grad_(True)
        scale = weight.exp()
        scale.retain_grad()
        hooked = []
        scale.register_hook(lambda g, h=hooked: h.append(g.clone()))
        shift = weight * 2
        loss = ((x * scale + shift) ** 2).mean()
        (asked,) = torch.autograd.grad(loss, scale, retain_graph=True)
        loss.backward(inputs=[shift, weight], retain_graph=True)
        only = weight.grad.clone()
        loss.backward()
        found.append({"asked": asked, "hooked": hooked[-1], "kept": scale.grad, "only": only, "all": weight.grad})
    same({k: g.to_local() if whole else g for k, g in found[1].items()}, found[0])


@pytest.mark.parametrize("sizes", [(4, 2, 1), (0, 7, 0)])
@distributed(ranks=3)
def test_replicas_agree_to_the_bit(sizes):
    """Sums are added in one order on all ranks, whatever each of them has to do besides."""
    torch.manual_seed(4)
    weight, inner = torch.randn(6, requires_grad=True), nn.Conv1d(6, 6, 3, padding=1)
    scale = weight.exp()
    x = scatter_tensor(torch.randn(2, 6, ROWS), 0, domain_mesh(), [Shard(2)], sizes={0: sizes}).requires_grad_(True)
    for _ in range(6):
        x = inner(x) * scale.unsqueeze(1) + nn.functional.layer_norm(x.mT, (6,), scale).mT
    x.square().sum().backward()
    for grad in (weight.grad, *(p.grad for p in inner.parameters())):
        every = [torch.empty_like(grad) for _ in range(3)]
        torch.distributed.all_gather(every, grad.contiguous())
        assert torch.equal(every[0], every[1]) and torch.equal(every[0], every[2])


class Conditioned(nn.Module):
    """Blocks that scale and shift rows by what each finds from one embedded condition."""

    def __init__(self, blocks):
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(3, 4), nn.SiLU(), nn.Linear(4, 4))
        self.inner = nn.ModuleList(nn.Conv1d(4, 4, 3, padding=1) for _ in range(blocks))
        self.modulation = nn.ModuleList(nn.Sequential(nn.SiLU(), nn.Linear(4, 8)) for _ in range(blocks))

    def forward(self, x, condition):
        c = self.embed(condition)
        for inner, modulation in zip(self.inner, self.modulation, strict=True):
            scale, shift = (m.unsqueeze(-1) for m in modulation(c).chunk(2, 1))
            x = x + inner(x * (1 + scale) + shift)
        return x


@pytest.mark.parametrize("blocks", [1, 2, 5])
@pytest.mark.parametrize("sizes", [(4, 2, 1), (0, 7, 0)])
@distributed(ranks=3)
def test_layers_that_start_from_one_tensor_wait_together(blocks, sizes, monkeypatch):
    """One sum for all modulations, one for the weights; the values of one process, the same bits on every rank."""
    monkeypatch.setattr(backward_order, "LAYERS", 3)  # the first three; the others find their own place
    torch.manual_seed(5)
    model, full, condition = Conditioned(blocks).double(), torch.randn(2, 4, ROWS).double(), torch.randn(2, 3).double()
    model(full, condition).square().sum().backward()
    want = grads(model)
    model.zero_grad()
    x = scatter_tensor(full, 0, domain_mesh(), [Shard(2)], sizes={0: sizes})
    loss = model(x, condition).square().sum()
    with count_traffic() as traffic:
        loss.backward()
    if 0 not in sizes:
        waits, halos, weights = 1 + max(0, blocks - 3), blocks, 1
        assert traffic.calls == waits + halos + weights, (traffic.calls, waits, halos)
    same(grads(model), want)
    for p in model.parameters():
        every = [torch.empty_like(p.grad) for _ in range(3)]
        torch.distributed.all_gather(every, p.grad.contiguous())
        assert torch.equal(every[0], every[1]) and torch.equal(every[0], every[2])


@distributed(ranks=2)
def test_mixed_dtypes_and_memory_orders():
    def make():
        torch.manual_seed(2)
        model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 2)).double()
        return model.to(memory_format=torch.channels_last)

    results = []
    for x in (sample(1, 3, ROWS, 4), cut(sample(1, 3, ROWS, 4), dim=2)):
        model = make()
        plain_loss(model, x)
        results.append(grads(model))
        assert model[0].weight.grad.stride() == model[0].weight.stride()
    same(results[1], results[0])


@distributed(ranks=3)
def test_under_autocast_the_gradient_has_the_dtype_of_the_weight():
    model, x = mlp().float(), cut(sample(ROWS, 4).float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(x).float().pow(2).sum()
    loss.backward()
    twin = mlp().float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (twin(sample(ROWS, 4).float()).float() ** 2).sum().backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert p.grad.dtype is torch.float32
        torch.testing.assert_close(p.grad, q.grad, rtol=0.05, atol=0.05)


# ---------------------------------------------------------------------- who reads them, and when
@distributed(ranks=3)
def test_hooks_on_weights_see_the_complete_gradient():
    seen = [{}, {}]
    for record, x in zip(seen, (sample(ROWS, 4), cut(sample(ROWS, 4))), strict=True):
        model = mlp()
        hooks = [
            p.register_hook(lambda g, n=n, r=record: r.update({n: g.clone()})) for n, p in model.named_parameters()
        ]
        plain_loss(model, x)
        assert record.keys() == dict(model.named_parameters()).keys()
        same(grads(model), record)
        for hook in hooks:
            hook.remove()
        plain_loss(model, x)  # without hooks it is summed later again
        same(grads(model), {n: 2 * g for n, g in record.items()})
    same(seen[1], seen[0])


@distributed(ranks=3)
def test_hooks_may_change_the_gradient():
    def step(model, x):
        model[0].weight.register_hook(lambda g: g.clamp(-1, 1))
        model[3].weight.register_hook(lambda g: g * 2)
        plain_loss(model, x)

    both(step)


@distributed(ranks=3)
def test_an_optimizer_inside_backward():
    """A post-accumulate hook that steps and clears: the trick that saves the memory of gradients."""
    results = []
    for x in (sample(ROWS, 4), cut(sample(ROWS, 4))):
        model, order = mlp(), []
        for p in model.parameters():
            optimizer = torch.optim.SGD([p], lr=0.1)

            def step(weight, optimizer=optimizer, order=order):
                order.append(weight.grad.clone())
                optimizer.step()
                optimizer.zero_grad()

            p.register_post_accumulate_grad_hook(step)
        for _ in range(2):
            plain_loss(model, x)
        assert len(order) == 12 and all(p.grad is None for p in model.parameters())
        results.append({name: p.detach() for name, p in model.named_parameters()})
    same(results[1], results[0])


@distributed(ranks=3)
def test_autograd_grad():
    found = []
    for x in (sample(ROWS, 4), cut(sample(ROWS, 4))):
        model = mlp()
        loss = (model(x) ** 2).sum()
        weights = dict(model.named_parameters())
        found.append(dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True)))
        assert all(p.grad is None for p in model.parameters())
        some = torch.autograd.grad((model(x) ** 2).sum(), [model[0].weight])
        torch.testing.assert_close(some[0], found[-1]["0.weight"])
    same(found[1], found[0])


@distributed(ranks=3)
def test_only_the_inputs_that_are_asked_for():
    def step(model, x):
        (model(x) ** 2).sum().backward(inputs=[model[0].weight, model[3].bias])

    both(step, rounds=2)
    x = cut(sample(ROWS, 4), requires_grad=True)
    model = mlp()
    (model(x) ** 2).sum().backward(inputs=[x])
    assert all(p.grad is None for p in model.parameters()) and x.grad is not None


@distributed(ranks=3)
def test_plain_tensors_that_are_no_parameters():
    found = []
    for x in (sample(ROWS, 4), cut(sample(ROWS, 4))):
        scale = sample(4, seed=2).requires_grad_(True)
        rows = sample(ROWS, 1, seed=3).requires_grad_(True)  # cut with x: each rank has its own part of the gradient
        shift = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
        ((x * scale + rows).tanh() - shift).pow(2).mean().backward()
        found.append({"scale": scale.grad, "rows": rows.grad, "shift": shift.grad})
    same(found[1], found[0])


# ---------------------------------------------------------------------- trouble
class Trouble(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        raise ArithmeticError("in the middle of backward")


@distributed(ranks=3)
def test_a_pass_that_fails_leaves_the_next_one_clean():
    def step(model, x):
        y = model[3](Trouble.apply(model[:3](x)))
        with pytest.raises(ArithmeticError, match="in the middle"):
            (y**2).sum().backward()
        model.zero_grad()
        plain_loss(model, x)

    both(step)


@distributed(ranks=2)
def test_finished_passes_hold_nothing():
    model, x = mlp(), cut(sample(ROWS, 4))
    for _ in range(3):
        plain_loss(model, x)
    assert not gradient_buckets._tasks


@distributed(ranks=2)
def test_an_fsdp_model_that_only_one_rank_still_holds_in_memory_changes_nothing():
    """When garbage is collected differs between ranks; what they send to each other must not."""
    held = fully_shard(nn.Linear(4, 4), mesh=domain_mesh())
    if dist.get_rank() == 1:
        del held
        gc.collect()
    both(plain_loss)


@pytest.mark.parametrize("reentrant", [False, True])
@distributed(ranks=3)
def test_checkpoint(reentrant):
    def step(model, x):
        x = x.detach().requires_grad_(True)
        y = checkpoint(model[:3], x, use_reentrant=reentrant)
        (checkpoint(model[3], y, use_reentrant=reentrant) ** 2).sum().backward()
        assert x.grad is not None

    both(step, rounds=2)


@distributed(ranks=3)
def test_backward_inside_backward():
    """A hook that runs a backward pass of its own over the same weights."""

    def step(model, x):
        def nested(g):
            with torch.enable_grad():
                (model(x) ** 3).sum().backward()

        y = model(x)
        y.register_hook(nested)
        (y**2).sum().backward()

    both(step)


# ---------------------------------------------------------------------- second order
@distributed(ranks=3)
def test_second_order_over_weights():
    found = []
    for x in (sample(ROWS, 4), cut(sample(ROWS, 4))):
        model = mlp()
        weights = list(model.parameters())
        first = torch.autograd.grad((model(x) ** 2).mean(), weights, create_graph=True)
        sum((g**2).sum() for g in first).backward()
        found.append(grads(model))
    same(found[1], found[0])


# ---------------------------------------------------------------------- data parallel over the other axis
@pytest.mark.parametrize("how", ["plain", "checkpoint", "reentrant", "static", "accumulate"])
@distributed(ranks=4, timeout=60)
def test_ddp_over_the_other_axis(how):
    """The domain sums, DDP averages: together the gradient of the mean loss over the global batch."""
    mesh = grid_mesh()
    ddp_rank, domain = mesh.get_local_rank("ddp"), mesh["domain"]
    batch = [sample(ROWS, 4, seed=s) for s in range(2)]

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = mlp()

        def forward(self, x):
            if how in ("checkpoint", "reentrant"):
                x = checkpoint(self.layers[:3], x, use_reentrant=how == "reentrant")
                return self.layers[3](x)
            return self.layers(x)

    alone, net = Net(), Net()
    rounds = 2
    for _ in range(rounds):
        sum((alone(b.clone().requires_grad_(True)) ** 2).sum() / 2 for b in batch).backward()
    wrapped = DistributedDataParallel(net, process_group=mesh["ddp"].get_group(), static_graph=how == "static")
    x = cut(batch[ddp_rank], mesh=domain, requires_grad=True)
    for i in range(rounds):
        if how == "accumulate" and i == 0:
            with wrapped.no_sync():
                (wrapped(x) ** 2).sum().backward()
        else:
            (wrapped(x) ** 2).sum().backward()
    same(grads(net), grads(alone))


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("whole", [False, True])
@distributed(ranks=4, timeout=60)
def test_modulations_inside_wrappers(kind, learned, whole):
    """FSDP2 must find the weights of a modulation complete when the module's inputs have theirs, or never."""
    mesh = grid_mesh()
    batch, given = [sample(ROWS, 4, seed=s) for s in range(2)], sample(3, seed=8)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([modulated(), modulated()])
            self.given = nn.Parameter(given.clone(), requires_grad=learned)

        def forward(self, x):
            given = replicated(self.given, x) if whole else self.given
            for block in self.blocks:
                x = block(x, given)
            return x

    alone, net = Net(), Net()
    sum((alone(b) ** 2).sum() / 2 for b in batch).backward()
    if kind == "fsdp":
        for module in (*net.blocks, net):
            fully_shard(module, mesh=mesh["ddp"])
        run = net
    else:
        run = DistributedDataParallel(net, process_group=mesh["ddp"].get_group())
    (run(cut(batch[mesh.get_local_rank("ddp")], mesh=mesh["domain"])) ** 2).sum().backward()
    found = {k: g if g is None or kind == "ddp" else g.full_tensor() for k, g in grads(net).items()}
    same(found, grads(alone))


@distributed(ranks=4, timeout=60)
def test_a_grid_of_cuts():
    mesh = grid_mesh()
    full = sample(ROWS, 5, 4)
    alone, model = mlp(), mlp()
    for _ in range(2):
        plain_loss(alone, full)
        x = scatter_tensor(full, 0, mesh, [Shard(0), Shard(1)], sizes={0: (0, 7), 1: (4, 1)})
        plain_loss(model, x)
    same(grads(model), grads(alone))
    model.zero_grad()
    plain_loss(model, scatter_tensor(full, 0, mesh, [Shard(1), Replicate()]))
    plain_loss(model, scatter_tensor(full, 0, mesh, [Replicate(), Replicate()]))
    same(grads(model), grads(alone))


@distributed(ranks=2)
def test_deep_copies_have_gradients_of_their_own():
    model = mlp()
    plain_loss(model, cut(sample(ROWS, 4)))
    twin = copy.deepcopy(model)
    plain_loss(twin, cut(2 * sample(ROWS, 4)))
    wanted = mlp()
    plain_loss(wanted, sample(ROWS, 4))
    same(grads(model), grads(wanted))
    wanted = mlp()
    plain_loss(wanted, 2 * sample(ROWS, 4))
    same(grads(twin), grads(wanted))


@distributed(ranks=2)
def test_the_optimizer_sees_ordinary_tensors():
    model, x = mlp(), cut(sample(ROWS, 4))
    alone = mlp()
    for net, data in ((model, x), (alone, sample(ROWS, 4))):
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            plain_loss(net, data)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
    same(dict(model.named_parameters()), dict(alone.named_parameters()))
    everyone = [None, None]
    dist.all_gather_object(everyone, [p.detach() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*everyone, strict=True)), "the same bits on every rank"
    assert not any(isinstance(p.grad, ShardTensor) for p in model.parameters())
