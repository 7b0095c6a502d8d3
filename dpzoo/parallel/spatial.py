"""Parameters and buffers that lie on the grid, as position embeddings do: each rank of the domain keeps its part.

They become DTensors over the domain. A DTensor that meets a ShardTensor is one operand of the same tensor: the part
that is needed is used, or fetched where the shards of the sample have other sizes than `torch.chunk` gives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from dpzoo.parallel.axes import Axes
from dpzoo.parallel.pieces import dtensor_like
from dpzoo.shard import LayoutError
from dpzoo.shard import collectives as comm
from dpzoo.shard.mesh import MeshLayout
from dpzoo.shard.partition import chunk_sizes, starts

Dims = int | Sequence[int | None]
Spatial = Mapping[str, Dims] | Callable[[str, Tensor], Dims | None]


def shard_spatial(model: nn.Module, axes: Axes, spatial: Spatial) -> set[nn.Parameter]:
    """Replace the chosen parameters and buffers by DTensors over the domain, in place.

    Gradients of the new parameters are sharded alike, and averaged over the replicas as soon as they are there.

    Args:
        spatial: which tensors, and the dim that lies along the domain (one per axis, or None, for a domain of several
            axes). By pattern: `{"pos_embed": 1, "*.rope.*": 0}`; or a function of name and tensor.

    Returns:
        The new parameters.

    Raises:
        LayoutError: on every rank, for a pattern that fits no name, a dim that does not exist, or no domain.
    """
    if axes.domain is None:
        raise LayoutError(f"spatial={spatial}: {axes.mesh} has no domain axis to shard parameters over")
    named = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    made: dict[Tensor, Tensor] = {}
    for name, dims in _chosen(named, spatial).items():
        old = named[name]
        if old not in made:
            made[old] = _sharded(name, old, axes.domain, dims)
        _replace(model, name, made[old])
    new = {t for t in made.values() if isinstance(t, nn.Parameter)}
    for p in new:
        _average_over_replicas(p, axes)
    return new


def _chosen(named: Mapping[str, Tensor], spatial: Spatial) -> dict[str, Dims]:
    if callable(spatial):
        asked = {name: spatial(name, t) for name, t in named.items()}
        chosen = {name: dims for name, dims in asked.items() if dims is not None}
        unused = [] if chosen else ["the function chose none"]
    else:
        chosen = {n: dims for pattern, dims in spatial.items() for n in named if fnmatchcase(n, pattern)}
        unused = [p for p in spatial if not any(fnmatchcase(n, p) for n in named)]
    if unused:
        raise LayoutError(f"spatial: no parameter or buffer fits {unused}; there are {list(named)}")
    shared = {named[n] for n in chosen}
    missed = [n for n, t in named.items() if n not in chosen and any(t is s for s in shared)]
    if missed:
        raise LayoutError(
            f"spatial: {missed} are the same tensors as chosen ones under other names; choose all or none"
        )
    return chosen


def _sharded(name: str, t: Tensor, domain: DeviceMesh, dims: Dims) -> Tensor:
    """The part of this rank, in memory of its own, as a DTensor."""
    per_axis = [dims] if isinstance(dims, int) else list(dims)
    layout = MeshLayout.of(domain)
    cut = [d for d in per_axis if d is not None]
    if len(per_axis) != domain.ndim or any(not -t.ndim <= d < t.ndim for d in cut) or len(set(cut)) != len(cut):
        raise LayoutError(
            f"spatial: {name} has shape {tuple(t.shape)}; the dims {dims} must be one per axis of {layout}, and exist"
        )
    local = t.detach()
    for axis, dim in enumerate(per_axis):
        if dim is not None:
            sizes = chunk_sizes(t.shape[dim], layout.shape[axis])
            local = local.narrow(dim, starts(sizes)[layout.coords[axis]], sizes[layout.coords[axis]])
    placements = [Replicate() if d is None else Shard(d % t.ndim) for d in per_axis]
    local = local.clone(memory_format=torch.contiguous_format)
    stride = torch.empty(t.shape, device="meta").stride()
    made = DTensor.from_local(local, domain, placements, run_check=False, shape=t.shape, stride=stride)
    return nn.Parameter(made, t.requires_grad) if isinstance(t, nn.Parameter) else made


def _replace(model: nn.Module, name: str, new: Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    if isinstance(new, nn.Parameter):
        module._parameters[leaf] = new
    else:
        module._buffers[leaf] = new


def _average_over_replicas(p: nn.Parameter, axes: Axes) -> None:
    """After every pass. What is there from earlier passes is alike on all replicas, so its mean is itself."""
    layout = None if axes.ddp is None or axes.replicas == 1 else MeshLayout.of(axes.ddp)

    def average(p: Tensor) -> None:
        assert isinstance(p, DTensor) and isinstance(p.grad, DTensor)
        grad = p.grad.redistribute(placements=p.placements)
        if layout is not None:
            local = grad.to_local()
            for group in layout.groups:
                local = comm.all_reduce(local, group)
            # Not in place: what arrived may be the gradient of another operand too, which is still on its way.
            grad = dtensor_like(local / axes.replicas, p)
        p.grad = grad

    trained = p.requires_grad
    p.requires_grad_(True)  # a hook can be given only then; it stays for those that are thawed later
    p.register_post_accumulate_grad_hook(average)
    p.requires_grad_(trained)
