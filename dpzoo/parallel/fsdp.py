"""FSDP2 over the data-parallel axis, or over it and the domain at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn
from torch.compiler import disable  # as FSDP2 does with its hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from dpzoo.parallel.axes import Axes, flat
from dpzoo.shard import LayoutError
from dpzoo.shard.averaging import average_later
from dpzoo.shard.gradients import flat_sync
from dpzoo.shard.mesh import MeshLayout
from dpzoo.shard.synchronize import broadcast_tensors

Units = Callable[[str, nn.Module], bool]


def wrap_fsdp(
    model: nn.Module,
    axes: Axes,
    reduction: str,
    units: Units | None,
    ignored: set[nn.Parameter],
    options: dict[str, Any],
) -> nn.Module:
    """`fully_shard` the units of the model, then the rest of it, in place."""
    mesh = _mesh_of(axes, reduction)
    broadcast_buffers = options.pop("broadcast_buffers", True)
    if ignored:
        options = options | {"ignored_params": ignored | set(options.get("ignored_params") or ())}
    wrapped = [*_units(model, units or is_block), model]
    for module in wrapped:
        owned = _owned(module, options.get("ignored_params") or ())
        fully_shard(module, mesh=mesh, **options)
        if reduction == "flat":
            _promise(module, owned, axes.domain_groups)
    if reduction == "flat":
        _flat_forward(model)
    if broadcast_buffers and axes.replicas > 1:
        _same_buffers(model, axes)
    return model


def _mesh_of(axes: Axes, reduction: str) -> DeviceMesh:
    if reduction == "flat":
        return axes.all_ranks()
    if axes.ddp is None:
        raise LayoutError(
            f"{axes.mesh} has no data-parallel axis to shard the weights over with reduction='domain'; take "
            "reduction='flat', which shards them over the domain, or strategy='ddp'"
        )
    return flat(axes.ddp)


# ---------------------------------------------------------------------- which modules are gathered on their own
def is_block(name: str, module: nn.Module) -> bool:
    """Something composed, as the layers of a transformer are; single layers stay with their parent."""
    return any(True for child in module.children() for _ in child.parameters())


def _units(model: nn.Module, wanted: Units) -> list[nn.Module]:
    """Members of the outermost `Sequential`s and `ModuleList`s that are wanted and share no weight with others."""
    members = {name: m for name, m in _members(model, "") if wanted(name, m)}
    holders: Counter[nn.Parameter] = Counter()
    for module in model.modules():
        holders.update(p for p in module.parameters(recurse=False))
    found = []
    for module in members.values():
        inside = Counter(p for m in module.modules() for p in m.parameters(recurse=False))
        if inside and all(n == holders[p] for p, n in inside.items()):
            found.append(module)
    return found


def _members(module: nn.Module, prefix: str) -> Iterable[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        if isinstance(module, (nn.Sequential, nn.ModuleList)):
            yield prefix + name, child
        else:
            yield from _members(child, f"{prefix}{name}.")


# ---------------------------------------------------------------------- the one reduction
def _owned(module: nn.Module, ignored: Iterable[nn.Parameter]) -> list[tuple[nn.Module, str]]:
    """Where the weights are registered that the next `fully_shard(module)` will take."""
    left_out = set(ignored)
    return [
        (m, name)
        for m in module.modules()
        for name, p in m.named_parameters(recurse=False)
        if not isinstance(p, DTensor) and p not in left_out
    ]


def _promise(module: nn.Module, owned: list[tuple[nn.Module, str]], groups: dict[str, int]) -> None:
    """In every forward, after FSDP2 has gathered them: the leaves of this module will be averaged over all ranks."""

    def promise(*_: Any) -> None:
        leaves = (m._parameters[name] for m, name in owned)
        average_later((p for p in leaves if p is not None and not isinstance(p, DTensor)), groups)

    module.register_forward_pre_hook(disable(promise))


def _flat_forward(model: nn.Module) -> None:
    """Run the forward of the model under `grad_sync("flat")`."""
    open_forwards: list[ExitStack] = []

    def enter(*_: Any) -> None:
        stack = ExitStack()
        stack.enter_context(flat_sync())
        open_forwards.append(stack)

    def leave(*_: Any) -> None:
        if open_forwards:
            open_forwards.pop().close()

    model.register_forward_pre_hook(disable(enter))
    model.register_forward_hook(disable(leave), always_call=True)


def _same_buffers(model: nn.Module, axes: Axes) -> None:
    """Before every forward in training, give all replicas the buffers of the first one, as DDP does."""
    assert axes.ddp is not None
    layout = MeshLayout.of(axes.ddp)

    def share(module: nn.Module, *_: Any) -> None:
        buffers: list[Tensor] = [b for b in model.buffers() if not isinstance(b, DTensor)]
        if module.training and buffers:
            broadcast_tensors(buffers, layout, 0)

    model.register_forward_pre_hook(disable(share))
