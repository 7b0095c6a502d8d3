"""Loss scaling for float16: whether a step is skipped is one decision of all ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dpzoo.parallel.pieces import piece_of, reduced
from dpzoo.shard import ShardTensor
from dpzoo.shard import collectives as comm
from dpzoo.shard.moved_view import wrote


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` for gradients that are plain, DTensors or ShardTensors, on any meshes.

    torch's own looks for infs in what this rank holds (of DTensors: over their mesh), so that ranks may decide
    differently, and their weights part. Here the finding is reduced over all ranks, once per step.

    Args:
        device: type of the device, as in torch.
        mesh: the ranks that step together; all processes by default.
        options: `init_scale`, `growth_factor`, `backoff_factor`, `growth_interval`, `enabled`.
    """

    def __init__(self, device: str = "cuda", *, mesh: DeviceMesh | None = None, **options: Any) -> None:
        super().__init__(device, **options)
        self._mesh = mesh

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Divide all gradients in place; 1.0 per device if any rank holds an inf or nan, else 0.0."""
        lists: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        found = {found_inf.device: found_inf}
        with torch.no_grad():
            for grad in _gradients(optimizer, allow_fp16):
                lists.setdefault((grad.device, grad.dtype), []).append(grad)
            for (device, _), grads in lists.items():
                flag = found.setdefault(device, found_inf.to(device, copy=True))
                torch._amp_foreach_non_finite_check_and_unscale_(grads, flag, inv_scale.to(device))
            anywhere = self._on_any_rank(torch.stack([flag.to(found_inf.device) for flag in found.values()]).amax())
        return {device: anywhere.to(device) for device in found}

    def _on_any_rank(self, flag: Tensor) -> Tensor:
        if not dist.is_available() or not dist.is_initialized():
            return flag
        mesh = self._mesh
        groups = [dist.group.WORLD] if mesh is None else [mesh.get_group(axis) for axis in range(mesh.ndim)]
        for group in groups:
            assert group is not None
            flag = comm.all_reduce(flag, group.group_name, "max")
        return flag


def _gradients(optimizer: torch.optim.Optimizer, allow_fp16: bool) -> list[Tensor]:
    """The memory of all gradients on this rank.

    Raises:
        ValueError: float16 gradients, which torch does not unscale.
        RuntimeError: sparse gradients.
    """
    found = []
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        grad = parameter.grad
        if grad is None:
            continue
        if grad.dtype is torch.float16 and not allow_fp16:
            raise ValueError(
                "GradScaler: a gradient is float16; keep the weights in float32 and compute under autocast"
            )
        if grad.layout is not torch.strided:
            raise RuntimeError("GradScaler: a gradient is sparse; make the embedding with sparse=False")
        if isinstance(grad, (DTensor, ShardTensor)):
            whole = reduced(grad)
            if whole is not grad:  # a sum of parts may overflow where no part does
                parameter.grad = grad = whole
            if isinstance(grad, ShardTensor):
                wrote(grad)
        found.append(piece_of(grad).local)
    return found
