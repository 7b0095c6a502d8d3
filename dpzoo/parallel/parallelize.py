"""One call that makes a model train over replicas and over the ranks that share a sample."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from dpzoo.parallel.axes import AxisNames, split_axes
from dpzoo.parallel.ddp import wrap_ddp
from dpzoo.parallel.fsdp import Units, wrap_fsdp
from dpzoo.parallel.preparing import FSDP1, check_wrappable, make_contiguous
from dpzoo.parallel.spatial import Spatial, shard_spatial
from dpzoo.shard import sync_module_over_mesh

Strategy = Literal["ddp", "fsdp"]
Reduction = Literal["auto", "flat", "domain"]


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    strategy: Strategy = "ddp",
    ddp_axis: AxisNames = "ddp",
    domain_axis: AxisNames = "domain",
    reduction: Reduction = "auto",
    verify: bool = False,
    spatial: Spatial | None = None,
    units: Units | None = None,
    **options: Any,
) -> nn.Module:
    """Make all ranks start from the same weights and end every backward pass with the same, complete gradients.

    A gradient is the sum over the domain and the mean over the replicas: that of one process whose loss is the mean
    over the global batch. Inputs are still cut by the caller, over the domain part of the mesh (`mesh["domain"]`).

    Args:
        model: plain parameters and buffers. Those that overlap themselves in memory, and for FSDP2 all that are not
            contiguous, are laid out anew.
        mesh: every axis is named as data-parallel or domain axis; a mesh without the one has one rank of it.
        strategy: "ddp", or "fsdp" for FSDP2, which shards the weights: make the optimizer afterwards.
        reduction: "flat": one reduction over all ranks; FSDP2 then shards over all of them. "domain": parts are summed
            over the domain as they arise, and the wrapper averages over the replicas only. "auto": the faster, "flat".
        verify: do not copy the weights of the first rank to the others, only check that they are the same.
        spatial: FSDP2 only: parameters and buffers to shard over the domain, see `shard_spatial`.
        units: FSDP2 only: which members of the outermost `Sequential`s and `ModuleList`s are gathered on their own, as
            a function of name and module; by default those composed of other layers.
        options: for `DistributedDataParallel` or `fully_shard`. `broadcast_buffers` (True) serves both: all replicas
            take the buffers of the first before each forward (FSDP2: in training).

    Returns:
        With "ddp" the model inside `DistributedDataParallel`, or the model itself if there is one replica. With "fsdp"
        the model, changed in place.

    Raises:
        ValueError: an unknown strategy or reduction, or arguments of the other strategy.
        LayoutError: a mesh or spatial parameters that do not fit.
        ShardError: a model that is wrapped already, or in FSDP1, or (with `verify`) weights that differ.
        All on every rank.
    """
    _check_arguments(strategy, reduction, spatial, units)
    axes = split_axes(mesh, ddp_axis, domain_axis)
    check_wrappable(model)
    make_contiguous(model, keep_memory_formats=strategy == "ddp")
    sync_module_over_mesh(model, mesh, verify=verify)
    reduction = "flat" if reduction == "auto" else reduction
    if strategy == "ddp":
        return wrap_ddp(model, axes, reduction, options)
    return wrap_fsdp(
        model, axes, reduction, units, set() if spatial is None else shard_spatial(model, axes, spatial), options
    )


def _check_arguments(strategy: str, reduction: str, spatial: Spatial | None, units: Units | None) -> None:
    if strategy in ("fsdp1", "FSDP"):
        raise ValueError(f"strategy={strategy!r}: {FSDP1}")
    for name, value, known in (
        ("strategy", strategy, ("ddp", "fsdp")),
        ("reduction", reduction, ("auto", "flat", "domain")),
    ):
        if value not in known:
            raise ValueError(f"{name}={value!r}: take one of {', '.join(map(repr, known))}")
    if strategy == "ddp" and not (spatial is None and units is None):
        raise ValueError("spatial= and units= are for strategy='fsdp'; DDP keeps every parameter whole on every rank")


@contextmanager
def no_sync(model: nn.Module, hold: bool = True) -> Iterator[None]:
    """If `hold`, the gradients of this pass are added up and averaged over replicas with those of a later one.

    For a model in DDP, after `fully_shard`, or unwrapped (then nothing changes). Forward and backward go inside.
    """
    if hold and isinstance(model, DistributedDataParallel):
        # DDP cannot hold the first pass of a static graph. Averaged at once it is right as well: the mean is linear.
        first = model.static_graph and not model._static_graph_delay_allreduce_enqueued
        with nullcontext() if first else model.no_sync():
            yield
    elif hold and isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)
    else:
        yield
