"""Runs a computation on one process and on all ranks: do they agree, how long does each take, what was sent?"""

import time
from collections.abc import Callable, Mapping
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dpzoo.shard import ShardTensor
from dpzoo.shard.traffic import count_traffic

Computation = Callable[[], Mapping[str, Tensor]]

RELATIVE_LIMIT = 1e-10  # float64: far above rounding, far below any mistake
REPEATS = 5


def compare(what: str, mesh: DeviceMesh, one_process: Computation, on_ranks: Computation) -> bool:
    """Print how far the named results differ, both times and the bytes sent; True, on every rank, if they agree.

    `one_process` runs on the first rank alone, while the others wait. Times are medians of 5 runs after a first one.
    """
    with count_traffic() as traffic:
        results = on_ranks()
    whole = {name: t.full_tensor() if isinstance(t, ShardTensor) else t for name, t in results.items()}
    parallel_s = _seconds(on_ranks, mesh)
    first = mesh.get_local_rank() == 0
    serial_s = _seconds(one_process if first else None, mesh)
    differences = {name: difference(whole[name], t) for name, t in one_process().items()} if first else {}
    worst = _over_ranks(max(differences.values(), default=0.0), dist.ReduceOp.MAX, mesh)
    sent = _over_ranks(float(traffic.nbytes), dist.ReduceOp.SUM, mesh)
    if first:
        report = ", ".join(f"{name} {value:.1e}" for name, value in differences.items())
        print(
            f"{what}: differs from one process by: {report}\n"
            f"    one process {serial_s * 1e3:.2f} ms, {mesh.size()} ranks {parallel_s * 1e3:.2f} ms, "
            f"{sent:,.0f} bytes sent between them",
            flush=True,
        )
    return worst <= RELATIVE_LIMIT


def difference(value: Tensor, reference: Tensor) -> float:
    """Largest difference in units of the reference's largest magnitude; of integers the share that differs.

    Infinite if the shapes differ or a number is missing (NaN) in one of them.
    """
    if value.shape != reference.shape:
        return float("inf")
    if not reference.numel():
        return 0.0
    value, reference = value.detach(), reference.detach()
    if not reference.is_floating_point():
        return (value != reference).double().mean().item()
    scale = reference.abs().max().clamp_min(torch.finfo(reference.dtype).tiny)
    found = ((value - reference).abs().max() / scale).item()
    return found if found == found else float("inf")


def _seconds(run: Computation | None, mesh: DeviceMesh) -> float:
    """Median wall time from a moment when all ranks are ready to the moment when all are done."""
    taken = []
    for _ in range(REPEATS):
        _over_ranks(0.0, dist.ReduceOp.MAX, mesh)
        begin = time.perf_counter()
        if run is not None:
            run()
        _over_ranks(0.0, dist.ReduceOp.MAX, mesh)
        taken.append(time.perf_counter() - begin)
    return median(taken)


def _over_ranks(value: float, op: dist.ReduceOp.RedOpType, mesh: DeviceMesh) -> float:
    """One number reduced over the mesh; its `item()` waits for the device, so that it serves as a barrier too."""
    t = torch.tensor(value, dtype=torch.float64, device=mesh.device_type)
    dist.all_reduce(t, op, group=mesh.get_group())
    return t.item()
