"""Microseconds that a sharded tensor costs over a plain one, op by op and for two chains of layers.

    python benchmarks/overhead.py            # some minutes; prints tables, writes build/overhead.json
    python benchmarks/overhead.py --quick

Every implementation runs the same function on tensors so small that only the bookkeeping shows.  The implementations
take turns in one process (round-robin chunks), so a busy machine slows all of them.  The figure is processor time of
the calling thread, the minimum over the chunks (on a machine that is never quiet ask for ``--median``, whose ratios
are steadier); both, and wall time, are in the JSON file.  Three settings:

    one       a mesh of one rank
    fake      rank 0 of 2 with torch's "fake" process group: what an op costs without its communication
    two       two gloo ranks on this machine, communication included (figure: wall time, median)

The functions run forward under ``no_grad``, and forward + backward from a given cotangent.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing as mp
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

TOKENS, WIDTH, HEADS = 7, 16, 4
STEPS = ("forward", "forward+backward")
SETTINGS = ("one", "fake", "two")


# ---------------------------------------------------------------------------------------------- implementations
class Plain:
    """torch itself, on the rows that one rank would hold, so that the arithmetic is the same."""

    name = "plain"

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh, self.ranks, self.rank = mesh, mesh.size(), mesh.get_local_rank()

    def input(self, full: torch.Tensor, dim: int) -> torch.Tensor:
        """``full`` cut along ``dim``, a leaf that requires grad."""
        return self.rows(full, dim).requires_grad_(True)

    def weight(self, full: torch.Tensor) -> torch.Tensor:
        """A replicated leaf that requires grad."""
        return full.clone().requires_grad_(True)

    def module(self, module: nn.Module) -> nn.Module:
        """A module with replicated parameters."""
        return module

    def rows(self, full: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's part, in ``torch.chunk`` sizes."""
        return full.chunk(self.ranks, dim)[self.rank].clone()

    def shapes(self, full: torch.Tensor, dim: int) -> tuple[tuple[int, ...], ...]:
        """Every rank's local shape."""
        return tuple(tuple(part.shape) for part in full.chunk(self.ranks, dim))


class Dpzoo(Plain):
    name = "dpzoo"

    def input(self, full: torch.Tensor, dim: int) -> torch.Tensor:
        from dpzoo.shard import Shard, ShardTensor

        shapes = {0: self.shapes(full, dim)}
        made = ShardTensor.from_local(self.rows(full, dim), self.mesh, [Shard(dim)], sharding_shapes=shapes)
        return made.detach().requires_grad_(True)


class TorchDTensor(Plain):
    name = "DTensor"

    def input(self, full: torch.Tensor, dim: int) -> torch.Tensor:
        from torch.distributed.tensor import DTensor, Shard

        rows, shape, stride = self.rows(full, dim), full.shape, full.stride()
        return DTensor.from_local(rows, self.mesh, [Shard(dim)], shape=shape, stride=stride).detach().requires_grad_()

    def weight(self, full: torch.Tensor) -> torch.Tensor:
        from torch.distributed.tensor import DTensor, Replicate

        return DTensor.from_local(full.clone(), self.mesh, [Replicate()]).detach().requires_grad_()

    def module(self, module: nn.Module) -> nn.Module:
        from torch.distributed.tensor import distribute_module

        return distribute_module(module, self.mesh)


class PhysicsNemo(Plain):
    name = "PhysicsNeMo"

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__(mesh)
        from physicsnemo.domain_parallel import register_custom_ops

        register_custom_ops()

    def input(self, full: torch.Tensor, dim: int) -> torch.Tensor:
        from physicsnemo.domain_parallel import ShardTensor
        from torch.distributed.tensor import Shard

        shapes = {0: self.shapes(full, dim)}
        made = ShardTensor.from_local(self.rows(full, dim), self.mesh, [Shard(dim)], sharding_shapes=shapes)
        return made.detach().requires_grad_(True)


def implementations(mesh: DeviceMesh) -> list[Plain]:
    """Those that can be imported here, the reference first."""
    found: list[Plain] = [Plain(mesh)]
    for kind, package in ((Dpzoo, "dpzoo.shard"), (TorchDTensor, "torch"), (PhysicsNemo, "physicsnemo")):
        try:
            if importlib.util.find_spec(package) is not None:
                found.append(kind(mesh))
        except ImportError as error:
            print(f"{kind.name} is left out: {error}", file=sys.stderr)
    return found


# ---------------------------------------------------------------------------------------------- what is timed
class Mlp(nn.Module):
    """x + W2 gelu(W1 norm(x))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class VitBlock(nn.Module):
    """Pre-norm attention and MLP, as in ViT."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.proj = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = Mlp(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, c))
        return self.mlp(x)


Make = Callable[[Plain], tuple[Callable[[], Any], list[torch.Tensor]]]


@dataclass(frozen=True)
class Row:
    """One line of the table: ``make(implementation)`` gives the call and the leaves that get a gradient."""

    name: str
    make: Make
    repeats: int = 40


def unary(call: Callable[[torch.Tensor], Any], shape: tuple[int, ...] = (1, TOKENS, WIDTH), dim: int = 1) -> Make:
    """``call(x)`` with x sharded along ``dim``."""

    def make(impl: Plain) -> tuple[Callable[[], Any], list[torch.Tensor]]:
        x = impl.input(torch.randn(shape), dim)
        return lambda: call(x), [x]

    return make


def several(call: Callable[..., Any], inputs: list[tuple[int, ...]], dim: int, weights: list[tuple[int, ...]]) -> Make:
    """``call(*inputs, *weights)``: inputs sharded along ``dim``, weights replicated."""

    def make(impl: Plain) -> tuple[Callable[[], Any], list[torch.Tensor]]:
        leaves = [impl.input(torch.randn(shape), dim) for shape in inputs]
        leaves += [impl.weight(torch.randn(shape)) for shape in weights]
        return lambda: call(*leaves), leaves

    return make


def chain(blocks: Callable[[], list[nn.Module]], tokens: int = TOKENS) -> Make:
    """A sequence of modules on x (1, tokens, WIDTH)."""

    def make(impl: Plain) -> tuple[Callable[[], Any], list[torch.Tensor]]:
        torch.manual_seed(0)
        module = impl.module(nn.Sequential(*blocks()))
        x = impl.input(torch.randn(1, tokens, WIDTH), 1)
        return lambda: module(x), [x, *module.parameters()]

    return make


_X = (1, TOKENS, WIDTH)
_Q = (1, HEADS, TOKENS, WIDTH // HEADS)
ROWS = (
    Row("add(x, x2)", several(torch.add, [_X, _X], 1, [])),
    Row("add(x, plain bias)", several(torch.add, [_X], 1, [(WIDTH,)])),
    Row("mul scalar", unary(lambda x: x * 1.5)),
    Row("gelu", unary(F.gelu)),
    Row("linear", several(F.linear, [_X], 1, [(WIDTH, WIDTH), (WIDTH,)])),
    Row("layer_norm", several(lambda x, w, b: F.layer_norm(x, (WIDTH,), w, b), [_X], 1, [(WIDTH,), (WIDTH,)])),
    Row("softmax(-1)", unary(lambda x: x.softmax(-1))),
    Row("transpose", unary(lambda x: x.transpose(1, 2))),
    Row("view, split heads", unary(lambda x: x.view(1, x.shape[1], HEADS, WIDTH // HEADS))),
    Row("permute", unary(lambda x: x.permute(2, 0, 1))),
    Row("chunk(3, -1)[0]", unary(lambda x: x.chunk(3, -1)[0])),
    Row("x[..., :4]", unary(lambda x: x[..., :4])),
    Row("cat on features", several(lambda x, y: torch.cat((x, y), -1), [_X, _X], 1, [])),
    Row("sum()", unary(lambda x: x.sum())),
    Row("mean()", unary(lambda x: x.mean())),
    Row("mean(-1)", unary(lambda x: x.mean(-1))),
    Row("sdpa, heads sharded", several(F.scaled_dot_product_attention, [(1, HEADS, TOKENS, 4)] * 3, 1, [])),
    Row("sdpa, tokens sharded", several(F.scaled_dot_product_attention, [_Q] * 3, 2, [])),
    Row("20 elementwise", unary(lambda x: _elementwise(x)), 5),
    Row("CHAIN 4 x pre-LN MLP", chain(lambda: [Mlp(WIDTH) for _ in range(4)]), 5),
    Row("CHAIN 2 x ViT block", chain(lambda: [VitBlock(WIDTH, HEADS) for _ in range(2)], 8), 5),
)


def _elementwise(x: torch.Tensor) -> torch.Tensor:
    for _ in range(10):
        x = F.gelu(x) + 0.1
    return x


# ---------------------------------------------------------------------------------------------- how it is timed
def steps_of(row: Row, impl: Plain) -> dict[str, Callable[[], None] | str]:
    """What is timed of a row, ``forward`` and ``forward+backward``; text instead of a function where it raises."""
    torch.manual_seed(0)
    state: dict[str, Any] = {}

    def prepare() -> None:
        state["call"], state["leaves"] = row.make(impl)
        state["cotangent"] = torch.ones_like(state["call"]()).detach()

    def forward() -> None:
        with torch.no_grad():
            state["call"]()

    def both() -> None:
        for leaf in state["leaves"]:
            leaf.grad = None
        state["call"]().backward(state["cotangent"])

    steps: dict[str, Callable[[], None] | str] = {}
    for name, step in zip(STEPS, (forward, both), strict=True):
        try:
            if not state:
                prepare()
            step()
            step()
            steps[name] = step
        except Exception as error:
            steps[name] = f"{type(error).__name__}: {str(error)[:160]}"
    return steps


def measure(row: Row, impls: list[Plain], chunks: int, broken: set[str]) -> dict[str, Any]:
    """Times of one row, per implementation and step, the implementations taking turns chunk by chunk."""
    ready: dict[tuple[str, str], Callable[[], None]] = {}
    result: dict[str, Any] = {impl.name: {} for impl in impls}
    for impl in impls:
        if impl.name in broken:
            continue
        for name, step in steps_of(row, impl).items():
            if isinstance(step, str):
                result[impl.name][name] = {"error": step}
            else:
                ready[impl.name, name] = step
    times: dict[tuple[str, str], list[tuple[float, float]]] = {name: [] for name in ready}
    for _ in range(chunks):
        for key, act in ready.items():
            times[key].append(_chunk(act, row.repeats))
    for (impl_name, name), pairs in times.items():
        cpu, wall = zip(*pairs, strict=True)
        figures = {"cpu_min": min(cpu), "cpu_median": statistics.median(cpu)}
        result[impl_name][name] = figures | {"wall_min": min(wall), "wall_median": statistics.median(wall)}
    return result


def _chunk(act: Callable[[], None], repeats: int) -> tuple[float, float]:
    cpu, wall = time.thread_time(), time.perf_counter()
    for _ in range(repeats):
        act()
    return (time.thread_time() - cpu) / repeats * 1e6, (time.perf_counter() - wall) / repeats * 1e6


def run_setting(setting: str, rank: int, folder: str, names: list[str], chunks: int, broken: dict[str, Any]) -> None:
    """The whole table in one setting; rank 0 writes ``<setting>.json`` into ``folder``."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    ranks = 1 if setting == "one" else 2
    if setting == "fake":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    else:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = dist.FileStore(f"{folder}/store-{setting}", ranks)
        limit = timedelta(seconds=120)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=limit)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("domain",))
    impls = implementations(mesh)
    table: dict[str, Any] = {}
    for row in ROWS:
        if names and not any(name in row.name for name in names):
            continue
        table[row.name] = measure(row, impls, chunks, broken.get(row.name, set()))
        if rank == 0:
            print(f"{setting}: {row.name}", file=sys.stderr, flush=True)
            Path(f"{folder}/{setting}.json").write_text(json.dumps(table))
    dist.destroy_process_group()


def collect(settings: list[str], names: list[str], chunks: int) -> dict[str, Any]:
    """All settings, each in fresh processes.  What raises with the fake group is not tried on real ranks."""
    results: dict[str, Any] = {}
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        for setting in settings:
            broken = _broken_rows(results.get("fake", {})) if setting == "two" else {}
            arguments = [(setting, rank, folder, names, chunks, broken) for rank in range(2 if setting == "two" else 1)]
            processes = [context.Process(target=run_setting, args=given) for given in arguments]
            for process in processes:
                process.start()
            for process in processes:
                process.join()
            file = Path(folder) / f"{setting}.json"
            results[setting] = json.loads(file.read_text()) if file.exists() else {}
    return results


def _broken_rows(table: dict[str, Any]) -> dict[str, set[str]]:
    return {
        row: {name for name, cell in cells.items() if any("error" in step for step in cell.values())}
        for row, cells in table.items()
    }


# ---------------------------------------------------------------------------------------------- how it is shown
def render(results: dict[str, Any], cpu: str = "cpu_min") -> str:
    """One table per setting: microseconds forward / forward+backward, and times plain in brackets."""
    lines = []
    for setting, table in results.items():
        figure = "wall_median" if setting == "two" else cpu
        names = list(dict.fromkeys(name for cells in table.values() for name in cells))
        lines += ["", f"{setting}: us forward / forward+backward, {figure.replace('_', ' ')} (times plain)"]
        lines.append(f"{'':24}" + "".join(f"{name:>30}" for name in sorted(names, key=lambda n: n != "plain")))
        for row, cells in table.items():
            plain = [cells["plain"][step][figure] for step in STEPS]
            texts = [_cell(cells.get(name, {}), plain, figure) for name in sorted(names, key=lambda n: n != "plain")]
            lines.append(f"{row:24}" + "".join(f"{text:>30}" for text in texts))
    return "\n".join(lines)


def _cell(cell: dict[str, Any], plain: list[float], figure: str) -> str:
    if not cell:
        return "-"
    values = [cell[step].get(figure) for step in STEPS]
    times = "/".join("raises" if value is None else f"{value:.0f}" for value in values)
    if values == plain or values == [None, None]:
        return times if values == plain else "raises"
    ratios = ["-" if value is None else f"{value / base:.1f}x" for value, base in zip(values, plain, strict=True)]
    return f"{times} ({'/'.join(ratios)})"


def main() -> None:
    """Parse, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="6 chunks instead of 60")
    parser.add_argument("--median", action="store_true", help="median instead of minimum over the chunks")
    parser.add_argument("--setting", action="append", choices=SETTINGS, help="repeatable; default all three")
    parser.add_argument("--row", action="append", default=[], help="part of a row's name; repeatable")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "overhead.json")
    options = parser.parse_args()
    results = collect(options.setting or list(SETTINGS), options.row, 6 if options.quick else 60)
    print(render(results, "cpu_median" if options.median else "cpu_min"))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"torch": torch.__version__, "settings": results}, indent=1))
    print(f"\nwritten to {options.out}")


if __name__ == "__main__":
    main()
