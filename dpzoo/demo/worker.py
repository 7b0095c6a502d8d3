"""One rank of one run of the demo: reads its rows, trains, measures, writes its result to a file.

`plain` runs the whole grid in one process with ordinary tensors; `domain_parallel` is the same but for the rows that
are read and the one line that makes a ShardTensor of them.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dpzoo.demo.data import GRID, ForecastPairs, patch_row_split
from dpzoo.demo.memory import PeakMemory, activation_bytes
from dpzoo.demo.optional import require
from dpzoo.demo.train import DemoConfig, Lift, build_model, evaluate, train

GROUP_TIMEOUT = timedelta(seconds=120)


@dataclass
class RankResult:
    """What a rank found. `forecast` is the change predicted for the last held-out sample, `(4, 60, 120)`, on rank 0."""

    rows: int
    history: list[float]
    validation: float
    persistence: float
    kept_for_backward: int
    peak_memory: int
    seconds: float
    forecast: Tensor | None

    def save(self, path: Path) -> None:
        """Write to `path`, for `load`."""
        torch.save(asdict(self), path)

    @classmethod
    def load(cls, path: Path) -> "RankResult":
        """Read what `save` wrote."""
        return cls(**torch.load(path))


def plain(_: int, config: DemoConfig, dtype: torch.dtype, folder: Path) -> None:
    """The reference: the whole grid on one process, no ShardTensor anywhere."""
    torch.set_num_threads(1)
    memory = PeakMemory()
    _run(config, dtype, range(GRID[0]), lambda rows: rows.to(dtype), memory, "1 process").save(folder / "plain.pt")


def domain_parallel(rank: int, ranks: int, config: DemoConfig, dtype: torch.dtype, folder: Path) -> None:
    """Rank `rank` of `ranks`: reads its own rows of every sample; the model and the training loop are the same."""
    torch.set_num_threads(1)
    store = f"file://{folder / 'rendezvous'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=GROUP_TIMEOUT)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("domain",))
    memory = PeakMemory()
    sizes = patch_row_split(ranks, config.patch)
    start = sum(sizes[:rank])
    lift = lift_rows(mesh, sizes, dtype)
    rows = range(start, start + sizes[rank])
    result = _run(config, dtype, rows, lift, memory, f"{ranks} ranks" if rank == 0 else None)
    result.save(folder / f"rank{rank}.pt")
    dist.destroy_process_group()


def lift_rows(mesh: DeviceMesh, sizes: Sequence[int], dtype: torch.dtype) -> Lift:
    """The one place where the demo becomes domain-parallel: rows `(1, 4, sizes[rank], 120)` -> a sharded sample."""
    from dpzoo.shard import Shard, ShardTensor

    shapes: dict[int, Sequence[Sequence[int]]] = {0: tuple((1, 4, size, GRID[1]) for size in sizes)}

    def lift(rows: Tensor) -> Tensor:
        return ShardTensor.from_local(rows.to(dtype), mesh, [Shard(2)], sharding_shapes=shapes)

    return lift


def _run(
    config: DemoConfig, dtype: torch.dtype, rows: range, lift: Lift, memory: PeakMemory, title: str | None
) -> RankResult:
    """Train on `rows` of the grid and measure; the process that has a `title` shows a progress bar of that name."""
    pairs = ForecastPairs(list(config.train_members), rows.start, rows.stop)
    held_out = ForecastPairs(list(config.validation_members), rows.start, rows.stop)
    model = build_model(config).to(dtype)
    state, change = map(lift, pairs[0])
    kept = activation_bytes(lambda: F.mse_loss(model(state), change), model)
    begin = time.perf_counter()
    samples = config.epochs * len(pairs)
    with require("tqdm").tqdm(desc=title, total=samples, disable=title is None, unit="sample", leave=False) as bar:

        def on_sample(epoch: int, loss: float) -> None:
            bar.set_postfix_str(f"epoch {epoch + 1} loss {loss:.4f}", refresh=False)
            bar.update()

        history = train(model, pairs, config, lift, on_sample)
    seconds = time.perf_counter() - begin
    peak = memory.bytes()
    validation, persistence = evaluate(model, held_out, lift)
    with torch.no_grad():
        forecast = _whole(model(lift(held_out[len(held_out) - 1][0])))[0]
    return RankResult(
        len(rows), history, validation, persistence, kept, peak, seconds, forecast.clone() if title else None
    )


def _whole(tensor: Tensor) -> Tensor:
    """The whole tensor on every rank, for the figure."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
