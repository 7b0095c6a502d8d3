"""What a ShardTensor does as a Python and torch object: as a plain tensor does, and the same on every rank."""

import copy
import gc
import io
import pickle
import subprocess
import sys
import textwrap
import weakref

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import dpzoo
from dpzoo.shard import LayoutError, Partial, Replicate, Shard, ShardError, ShardTensor, scatter_tensor
from dpzoo.testing import column_mesh, distributed, domain_mesh, expect_error, grid_mesh

PLACES = {"cut": Shard(0), "copies": Replicate(), "summands": Partial()}


def whole(*shape):
    return torch.arange(float(torch.Size(shape).numel()), dtype=torch.float64).view(shape) + 1


def cut(full, place=None, **more):
    mesh = domain_mesh()
    x = scatter_tensor(full, 0, mesh, [Replicate()]).redistribute(placements=[place or Shard(0)])
    return x.detach().requires_grad_(more.get("requires_grad", False))


def alone(call):
    """Run `call` on rank 0 only: with a collective inside, the others would be missed and the test would hang."""
    out = call() if dist.get_rank() == 0 else None
    dist.barrier()
    return out


# ---------------------------------------------------------------------- graph
@distributed(ranks=[1, 3])
def test_leaves_and_graph(ranks):
    x = cut(whole(5))
    assert x.is_leaf and x.grad_fn is None and not x.requires_grad and x.grad is None
    assert x.requires_grad_() is x and x.requires_grad and x.is_leaf
    y = x * 2
    assert not y.is_leaf and y.grad_fn is not None and y.requires_grad
    z = y.detach()
    assert z.is_leaf and not z.requires_grad and isinstance(z, ShardTensor) and z.placements == y.placements
    z.zero_()
    assert not y.detach().full_tensor().any(), "detach shares memory"
    x.requires_grad = False
    assert not x.requires_grad
    with pytest.raises(RuntimeError, match="only change requires_grad flags of leaf"):
        y.requires_grad_(False)
    with pytest.raises(RuntimeError, match="floating point"):
        cut(torch.arange(4)).requires_grad_(True)


@distributed(ranks=3)
def test_requires_grad_in_the_middle_of_a_model():
    full, x = whole(5), cut(whole(5))
    (x * 2).requires_grad_(True)
    x.requires_grad_(True)
    (x * x).sum().backward()
    assert torch.equal(x.grad.full_tensor(), 2 * full)


@distributed(ranks=3)
def test_retain_grad_and_hooks():
    x, seen = cut(whole(5), requires_grad=True), []
    y = x * 3
    y.retain_grad()
    handle = y.register_hook(lambda g: seen.append(g) or g * 2)
    x.register_hook(lambda g: seen.append(g))
    x.register_post_accumulate_grad_hook(lambda t: seen.append(t.grad))
    y.sum().backward(retain_graph=True)
    assert [type(s) for s in seen] == [ShardTensor] * 3 and all(s.placements == x.placements for s in seen)
    assert y.retains_grad and torch.equal(y.grad.full_tensor(), torch.full((5,), 2.0, dtype=torch.float64))
    assert torch.equal(x.grad.full_tensor(), torch.full((5,), 6.0, dtype=torch.float64))
    assert torch.equal(seen[2].full_tensor(), x.grad.full_tensor())
    handle.remove()
    y.sum().backward()
    assert torch.equal(x.grad.full_tensor(), torch.full((5,), 9.0, dtype=torch.float64))


@distributed(ranks=3)
def test_grad_can_be_set():
    x = cut(whole(5), requires_grad=True)
    x.grad = torch.ones(5, dtype=torch.float64)  # plain: the whole gradient
    assert isinstance(x.grad, ShardTensor) and x.grad._spec.sizes == x._spec.sizes
    x.grad = scatter_tensor(whole(5), 0, domain_mesh(), [Shard(0)], sizes={0: (0, 5, 0)})  # cut elsewhere
    assert x.grad._spec.sizes == x._spec.sizes and torch.equal(x.grad.full_tensor(), whole(5))
    (x * 2).sum().backward()
    assert torch.equal(x.grad.full_tensor(), whole(5) + 2)
    x.grad.zero_()
    (x * 2).sum().backward()
    assert torch.equal(x.grad.full_tensor(), torch.full((5,), 2.0, dtype=torch.float64))
    x.grad = None
    assert x.grad is None
    with pytest.raises(RuntimeError):
        x.grad = torch.ones(4, dtype=torch.float64)
    with pytest.raises(RuntimeError):
        x.grad = torch.ones(5, dtype=torch.float32)


@distributed(ranks=2)
def test_accumulation_adds_into_the_same_tensor():
    x = cut(whole(5), requires_grad=True)
    (x * 2).sum().backward()
    held = x.grad
    (x * 3).sum().backward()
    assert x.grad is held and torch.equal(held.full_tensor(), torch.full((5,), 5.0, dtype=torch.float64))


@distributed(ranks=3)
def test_no_grad_and_inference_mode():
    x = cut(whole(5), requires_grad=True)
    layer = nn.Linear(5, 2).double()
    with torch.no_grad():
        assert not (x * 2).requires_grad and not x.redistribute(placements=[Replicate()]).requires_grad
        with torch.enable_grad():
            assert (x * 2).requires_grad
    with torch.inference_mode():
        y = cut(whole(4, 5)) + 1
        assert y.is_inference() and torch.equal(y.full_tensor(), whole(4, 5) + 1)
        assert layer(y).shape == (4, 2) and y.sum().item() == (whole(4, 5) + 1).sum().item()
        y.add_(1)
        assert torch.equal(y.full_tensor(), whole(4, 5) + 2)
    with torch.set_grad_enabled(False):
        assert not layer(cut(whole(4, 5))).requires_grad


VIEWS = {
    "detach": lambda t: t.detach(),
    "data": lambda t: t.data,
    "transpose": lambda t: t.transpose(0, 1),
    "alias": lambda t: t[:],
    "select": lambda t: t[:, 1],
    "slice": lambda t: t[:, 1:3],
    "ellipsis": lambda t: t[..., 1:],
    "unbind": lambda t: t.unbind(1)[3],
    "chunk": lambda t: t.chunk(2, 1)[1],
    "split": lambda t: t.split([1, 4], 1)[1],
    "expand": lambda t: t.unsqueeze(0).expand(1, 2, 5, 3),
    "view": lambda t: t.view(2, 5, 3, 1),
    "permute": lambda t: t.permute(2, 0, 1),
    "narrow": lambda t: t.narrow(1, 1, 3),
    "diagonal": lambda t: t.diagonal(0, 0, 2),
}


@distributed(ranks=2)
def test_views_in_inference_mode_of_a_tensor_from_outside():
    """They are no inference tensors, as in torch: a write through one counts for the tensor outside."""
    for name, view in VIEWS.items():
        full = whole(2, 5, 3).requires_grad_(True)
        x = cut(full.detach(), dim=1).requires_grad_(True)
        for t in (x, full):
            t.out = t * 1
            t.later = t.out.square()  # keeps t.out for backward
        with torch.inference_mode():
            found, wanted = view(x.out), view(full.out)
            assert not found.is_inference() and found.requires_grad is wanted.requires_grad, name
            assert torch.equal(found.full_tensor(), wanted), name
            found.mul_(2)
            wanted.mul_(2)
        assert torch.equal(x.out.full_tensor(), full.out), name
        for t in (x, full) if name != "data" else ():  # .data has a version counter of its own
            expect_error(t.later.sum().backward, RuntimeError, "modified by an inplace operation")


# ---------------------------------------------------------------------- copies, casts
@distributed(ranks=3)
def test_clone_and_casts():
    x = cut(whole(5), requires_grad=True)
    y = x.clone()
    assert y.requires_grad
    y.detach().zero_()
    assert x.detach().full_tensor().all(), "a clone has memory of its own"
    for cast in (
        lambda t: t.to(torch.float32),
        lambda t: t.float(),
        lambda t: t.to(torch.zeros((), dtype=torch.float16)),
        lambda t: t.to(dtype=torch.bfloat16, copy=True),
        lambda t: t.type(torch.int64),
        lambda t: t.half(),
        lambda t: t.to("cpu", torch.float32),
        lambda t: t.bool(),
        lambda t: t.type_as(torch.zeros(1, dtype=torch.float32)),
    ):
        want, got = cast(whole(5)), cast(x)
        assert got.dtype is want.dtype and got.placements == x.placements and torch.equal(got.full_tensor(), want)
    assert x.to(torch.float64) is x and x.to("cpu") is x and x.cpu() is x and x.contiguous() is x
    x.float().sum().backward()
    assert x.grad.dtype is torch.float64 and torch.equal(x.grad.full_tensor(), torch.ones(5, dtype=torch.float64))


@distributed(ranks=2)
def test_casts_of_summands_cast_the_sum():
    local = torch.tensor([0.6, -0.6, 1.0]) * (1 if dist.get_rank() else 1.5)
    x = ShardTensor.from_local(local, domain_mesh(), [Partial()])
    for dtype in (torch.int64, torch.bool, torch.float64):
        assert torch.equal(x.to(dtype).full_tensor(), x.full_tensor().to(dtype))


@distributed(ranks=3)
def test_deepcopy_and_copy():
    x = cut(whole(5), requires_grad=True)
    (x * 2).sum().backward()
    x.note = ["kept"]
    y = copy.deepcopy(x)
    assert isinstance(y, ShardTensor) and y.is_leaf and y.requires_grad and y._spec is x._spec
    assert torch.equal(y.full_tensor(), x.full_tensor()) and torch.equal(y.grad.full_tensor(), x.grad.full_tensor())
    assert y.grad is not x.grad and y.note == ["kept"] and y.note is not x.note
    with torch.no_grad():
        y.zero_()
    assert x.detach().full_tensor().all(), "a deep copy has memory of its own"
    a, b = copy.deepcopy([x, x])
    assert a is b
    z = copy.copy(x)
    assert z._local_tensor.data_ptr() == x._local_tensor.data_ptr() and z.requires_grad and z.note is x.note
    with pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(x * 2)


@distributed(ranks=2)
def test_saving_and_loading():
    for x in (cut(whole(5), requires_grad=True), cut(whole(5), Replicate()), nn.Parameter(cut(whole(5)))):
        file = io.BytesIO()
        torch.save({"x": x}, file)
        file.seek(0)
        for y in (pickle.loads(pickle.dumps(x)), torch.load(file, weights_only=True)["x"]):
            assert isinstance(y, ShardTensor) and y._spec is x._spec and y.requires_grad == x.requires_grad
            assert isinstance(y, nn.Parameter) == isinstance(x, nn.Parameter)
            assert torch.equal(y.full_tensor(), whole(5))


@distributed(ranks=2)
def test_the_shard_of_another_rank_is_not_loaded():
    saved = [None, None]
    dist.all_gather_object(saved, pickle.dumps(cut(whole(5))))
    expect_error(lambda: pickle.loads(saved[1 - dist.get_rank()]), LayoutError, "each rank loads its own")


@distributed(ranks=2)
def test_parameters():
    x = cut(whole(4, 3))
    p = nn.Parameter(x)
    assert isinstance(p, nn.Parameter) and isinstance(p, ShardTensor) and p.requires_grad and not x.requires_grad
    module = nn.Module()
    module.weight = p
    assert [name for name, _ in module.named_parameters()] == ["weight"]
    module.weight.sum().backward()
    assert torch.equal(p.grad.full_tensor(), torch.ones(4, 3, dtype=torch.float64))
    torch.optim.SGD(module.parameters(), lr=1.0).step()
    assert torch.equal(p.detach().full_tensor(), whole(4, 3) - 1)
    twin = copy.deepcopy(module)
    assert isinstance(twin.weight, nn.Parameter) and isinstance(twin.weight, ShardTensor)
    module.load_state_dict({"weight": cut(whole(4, 3))})
    assert torch.equal(p.detach().full_tensor(), whole(4, 3))
    module.to(torch.float32)
    assert module.weight.dtype is torch.float32 and isinstance(module.weight, nn.Parameter)
    assert not isinstance(x, nn.Parameter) and torch.is_tensor(x) and isinstance(x, torch.Tensor)


@distributed(ranks=2)
def test_data():
    x = cut(whole(5), requires_grad=True)
    x.data.mul_(2)
    assert torch.equal(x.detach().full_tensor(), 2 * whole(5)) and not x.data.requires_grad
    x.data = cut(whole(6), Replicate())
    assert x.shape == (6,) and x.placements == (Replicate(),) and x.requires_grad
    (x * 2).sum().backward()
    assert torch.equal(x.grad.full_tensor(), torch.full((6,), 2.0, dtype=torch.float64))
    with pytest.raises(TypeError, match="the data of a ShardTensor"):
        x.data = torch.ones(6)


# ---------------------------------------------------------------------- text and Python values
@distributed(ranks=3)
def test_printing_needs_no_other_rank():
    for place in PLACES.values():
        x = cut(whole(5), place, requires_grad=True)
        text = alone(lambda x=x: f"{x}|{x!r}|{x!s}|{x._spec}|{[x]}")
        assert dist.get_rank() or ("float64(5,)" in text and "requires_grad=True" in text and "local=" in text)
    alone(lambda: (x.shape, x.dtype, x.placements, len(x), x.numel(), x.stride(), x.is_contiguous(), hash(x)))


@pytest.mark.parametrize("place", list(PLACES))
@distributed(ranks=3)
def test_scalars_are_the_global_value(place):
    x = ShardTensor.from_local(torch.tensor(1.25), domain_mesh(), [Partial()]) if place == "summands" else None
    x = cut(torch.tensor(3.75), Replicate()) if x is None else x
    assert x.item() == 3.75 and float(x) == 3.75 and int(x) == 3 and bool(x) and complex(x) == 3.75
    assert f"{x:.1f}" == "3.8" and f"{x:8.3f}" == "   3.750" and x.tolist() == 3.75
    assert bool(x.requires_grad_() > 4) is False and x.item() == 3.75
    loss = cut(whole(5), PLACES[place]).mean()
    assert loss.item() == 3.0 and round(float(loss), 1) == 3.0 and max(loss, 2.0) is loss


@pytest.mark.parametrize("place", list(PLACES))
@distributed(ranks=3)
def test_values_of_one_element_wherever_it_lives(place):
    x = cut(torch.tensor([[7]]), PLACES[place])
    assert x.item() == 7 and int(x) == 7 and float(x) == 7.0 and bool(x) and [0] * 8 and range(9)[x] == 7
    assert x.tolist() == [[7]] and cut(whole(3, 2), PLACES[place]).tolist() == whole(3, 2).tolist()
    assert cut(torch.tensor([2.5]), PLACES[place]).item() == 2.5


@distributed(ranks=2)
def test_what_has_no_single_value_is_refused_as_by_torch():
    x, plain = cut(whole(3)), whole(3)
    for call in (
        bool,
        float,
        int,
        lambda t: t.item(),
        lambda t: range(9)[t],
        lambda t: f"{t:.2f}",
        lambda t: "rows" in t,
    ):
        with pytest.raises(Exception) as expected:
            call(plain)
        expect_error(lambda call=call: call(x), expected.type)
    expect_error(lambda: range(9)[cut(torch.tensor(2.0), Replicate())], TypeError, "only integer tensors")
    expect_error(lambda: bool(cut(torch.ones(0))), RuntimeError, "no values is ambiguous")
    expect_error(lambda: len(cut(torch.tensor(1.0), Replicate())), TypeError, "0-d")
    expect_error(lambda: list(cut(torch.tensor(1.0), Replicate())), TypeError, "0-d")


@distributed(ranks=2)
def test_numpy_is_refused():
    x = cut(whole(3))
    for call in (lambda: x.numpy(), lambda: np.asarray(x), lambda: np.array(x), lambda: x.numpy(force=True)):
        expect_error(call, TypeError, r"full_tensor\(\)\.numpy\(\)")
    for call in (x.data_ptr, x.storage, x.untyped_storage, lambda: x.resize_(2), lambda: x.set_(x), x.share_memory_):
        expect_error(call, ShardError, "full_tensor|to_local")


@distributed(ranks=[1, 3])
def test_iteration(ranks):
    full, x = whole(5, 2), cut(whole(5, 2))
    rows = list(x)
    assert (
        len(x) == 5 and len(rows) == 5 and all(torch.equal(a.full_tensor(), b) for a, b in zip(rows, full, strict=True))
    )
    assert torch.equal(list(x.T)[1].full_tensor(), full[:, 1])
    assert 4.0 in x and 99.0 not in x and torch.tensor(3.0) in x
    assert [i for i, row in enumerate(x) if row.sum() > 10] == [2, 3, 4]


@distributed(ranks=2)
def test_hash_and_comparison():
    x, y = cut(whole(4)), cut(whole(4))
    seen = {x: 1, y: 2}
    assert seen[x] == 1 and seen[y] == 2 and len({x, y, x}) == 2 and hash(x) == id(x)
    assert isinstance(x == y, ShardTensor) and (x == y).dtype is torch.bool and bool((x == y).all())
    assert (x == None) is False and (x != None) is True  # noqa: E711
    assert bool((x == 2).any()) and torch.equal(x, y) and torch.equal(x, whole(4)) and not torch.equal(x, y + 1)
    assert torch.allclose(x, y) and any(x is t for t in [y, x])


# ---------------------------------------------------------------------- metadata
@distributed(ranks=3)
def test_metadata_is_global():
    full, x = whole(5, 2, 3), cut(whole(5, 2, 3), Shard(-1))
    for ask in [
        "shape",
        "ndim",
        "dtype",
        "device",
        "layout",
        "itemsize",
        "nbytes",
        "requires_grad",
        "is_leaf",
        "is_sparse",
        "is_cuda",
        "is_quantized",
        "is_meta",
    ]:
        assert getattr(x, ask) == getattr(full, ask), ask
    for ask in [
        "size",
        "dim",
        "numel",
        "nelement",
        "ndimension",
        "stride",
        "element_size",
        "is_floating_point",
        "is_complex",
        "is_signed",
    ]:
        assert getattr(x, ask)() == getattr(full, ask)(), ask
    assert x.size(-1) == 3 and x.size(dim=1) == 2 and x.stride(1) == 3 and len(x) == 5 and x.is_contiguous()
    assert torch.numel(x) == 30 and torch.is_tensor(x) and torch.is_floating_point(x) and tuple(x.shape) == (5, 2, 3)
    with pytest.raises(IndexError):
        x.size(3)
    assert x.T.shape == full.T.shape if full.ndim == 2 else True


@distributed(ranks=3)
def test_transposed_views():
    full = torch.complex(whole(4, 5), -whole(4, 5))
    for name in ("T", "mT", "H", "mH"):
        y = getattr(cut(full), name)
        assert y.placements == (Shard(1),) and y.stride() == (1, 5), name
        assert torch.equal(y.full_tensor(), getattr(full, name)), name
    real = cut(whole(4, 5))
    real.T.add_(1)
    assert torch.equal(real.full_tensor(), whole(4, 5) + 1)
    assert not real.T.is_contiguous() and torch.equal(real.T.contiguous().full_tensor(), whole(4, 5).T + 1)


@distributed(ranks=2)
def test_channels_last_is_kept():
    full = whole(2, 3, 4, 6).contiguous(memory_format=torch.channels_last)
    me, mesh = dist.get_rank(), domain_mesh()
    x = ShardTensor.from_local(full[:, :, 3 * me : 3 + me].clone(), mesh, [Shard(2)])
    assert x.is_contiguous(memory_format=torch.channels_last) and x.stride() == full.stride()
    for y in (x + 1, x.relu(), x.clone(), x.float(), torch.zeros_like(x), nn.Conv2d(3, 5, 1).double()(x)):
        assert y.is_contiguous(memory_format=torch.channels_last)
        assert y._local_tensor.is_contiguous(memory_format=torch.channels_last)
    z = x.contiguous()
    assert z.is_contiguous() and z.to(memory_format=torch.channels_last).stride() == full.stride()
    assert torch.equal(z.full_tensor(), full)


@distributed(ranks=2)
def test_device_contexts_and_defaults():
    with torch.device("cpu"):
        x = cut(whole(4))
        assert torch.equal((x + torch.ones(4)).full_tensor(), whole(4) + 1)
        assert torch.zeros_like(x).placements == x.placements
    assert x.device == torch.device("cpu") and x.get_device() == -1 and x.to(x.device) is x


@distributed(ranks=2)
def test_randomness_of_the_script_is_untouched():
    torch.manual_seed(11)
    a = torch.rand(3)
    torch.manual_seed(11)
    x = cut(whole(6, 4), requires_grad=True)
    nn.functional.layer_norm(x.matmul(x.T).softmax(-1), (6,)).sum().backward()
    assert torch.equal(torch.rand(3), a)


# ---------------------------------------------------------------------- errors, and what is left behind
@distributed(ranks=4)
def test_an_error_inside_an_operator_reaches_the_user():
    x = cut(whole(4))
    other = scatter_tensor(whole(4), 0, grid_mesh(), [Shard(0), Replicate()])
    for operate in (lambda: x + other, lambda: x * other, lambda: other - x, lambda: x**other, lambda: x > other):
        expect_error(operate, LayoutError, "different meshes")
    column = column_mesh()
    mine = scatter_tensor(whole(4), column.mesh[0].item(), column, [Shard(0)])
    expect_error(lambda: mine @ x, LayoutError, "different meshes")


def _broken(func, types, args, kwargs):
    raise TypeError("a mistake in somebody's handler")


@distributed(ranks=2)
def test_a_type_error_in_a_handler_is_not_swallowed():
    from dpzoo.shard.tensor import FUNCTIONS

    x, before = cut(whole(4)), dict(FUNCTIONS)
    try:
        for func in (torch.Tensor.add, torch.Tensor.sub, torch.Tensor.mul, torch.Tensor.__rsub__, torch.Tensor.matmul):
            ShardTensor.register_function_handler(func, _broken)
        for operate in (
            lambda: x + x,
            lambda: x - x,
            lambda: x * torch.ones(4),
            lambda: torch.ones(4) - x,
            lambda: x @ x,
        ):
            expect_error(operate, TypeError, "a mistake in somebody's handler")
    finally:
        FUNCTIONS.clear()
        FUNCTIONS.update(before)
    for nonsense in (lambda: x + "a", lambda: [1] - x, lambda: x @ 3, lambda: x + None):
        expect_error(nonsense, TypeError)


class Tagged:
    """Another class that knows how to be added to a tensor."""

    def __radd__(self, other):
        return "tagged"


@distributed(ranks=2)
def test_other_classes_have_their_turn():
    assert cut(whole(4)) + Tagged() == "tagged"


SCRIPT = """
import os, warnings
warnings.simplefilter("error")
import torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn

def main(rank, store):
    warnings.simplefilter("error")
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    import dpzoo
    from torch.distributed.device_mesh import init_device_mesh
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("domain",))
    layer = nn.Linear(4, 4)
    x = dpzoo.scatter(torch.ones(5, 4), mesh, dim=0, requires_grad=True)
    for _ in range(3):
        layer(x)  # a result that nobody reads
        y = layer(x).sum()
        x.softmax(0)
        y.backward()
        del y
    layer(x).sum().backward(retain_graph=True)
    if rank == 0:
        print(x)
    dist.destroy_process_group()

if __name__ == "__main__":
    import tempfile
    mp.spawn(main, (os.path.join(tempfile.mkdtemp(), "store"),), nprocs=2)
"""


@distributed(ranks=[2, 4])
def test_no_cache_keeps_a_mesh_alive(ranks):
    """A cached layout must not hold process groups beyond their end; a tensor makes its mesh anew when asked."""
    from torch.distributed.device_mesh import init_device_mesh

    shape = (ranks,) if ranks == 2 else (2, 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)])
    gone, groups = weakref.ref(mesh), [mesh.get_group(a).group_name for a in range(mesh.ndim)]
    x = dpzoo.scatter(torch.ones(5, 4), mesh, dim=(0,) if ranks == 2 else (0, 1))
    (x + 1).sum()
    del mesh
    gc.collect()
    assert gone() is None
    again = x.device_mesh
    assert again.mesh_dim_names == ("a", "b")[: len(shape)] and tuple(again.shape) == shape
    assert [again.get_group(a).group_name for a in range(again.ndim)] == groups
    assert torch.equal(
        (x + dpzoo.scatter(torch.ones(5, 4), again, dim=(0,) if ranks == 2 else (0, 1))).full_tensor(),
        torch.full((5, 4), 2.0),
    )


def test_nothing_is_left_to_say_at_exit(tmp_path):
    """Discarded results leave no collective unawaited: two ranks end without a word on stderr."""
    script = tmp_path / "leave.py"
    script.write_text(textwrap.dedent(SCRIPT))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    noise = [line for line in done.stderr.splitlines() if "[Gloo]" not in line and line.strip()]
    assert not noise and "ShardTensor(float32(5, 4)" in done.stdout, done.stderr
