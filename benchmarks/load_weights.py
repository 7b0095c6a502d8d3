"""Time and memory of loading a safetensors file of 1 GB, on two ranks.

    python benchmarks/load_weights.py                  # minutes; prints a table, writes build/load_weights.json
    python benchmarks/load_weights.py --quick          # a file of 100 MB

The settings take turns, round by round:

    load_file           each rank: ``safetensors.torch.load_file`` and ``load_state_dict``
    whole               ``load_pretrained``: plain parameters, read by the first rank and sent to the other
    fsdp                ``load_pretrained``: parameters that ``fully_shard`` cut, each rank reads its part
    spatial             ``load_pretrained``: the large position embedding is a ShardTensor cut along its tokens, the
                        rest is plain

Memory is the most resident memory of a rank above its level before the model was built, model included (Linux); "share"
is what the rank's part of the model takes, "above" the difference. The file is in the page cache after the first round,
which is left out.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent))

import safetensors.torch
import torch
from taking_turns import ROOT, Setting, Step, measure
from torch import nn
from torch.distributed.fsdp import fully_shard

# Here, so that the memory of the modules is not counted.
from dpzoo.pretrained import load_pretrained
from dpzoo.shard import Shard, ShardTensor

RANKS = 2


@dataclass(frozen=True)
class Job:
    """The file, and the sizes of the model whose weights it holds."""

    file: Path
    tokens: int
    depth: int
    width: int = 1024

    def build(self, device: str) -> nn.Module:
        """Transformer blocks' matrices and a position embedding, as large as a weather grid's."""
        model = nn.Module()
        with torch.device("meta"):
            model.pos_embed = nn.Parameter(torch.empty(self.tokens, self.width))
            model.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(self.width, 4 * self.width), nn.Linear(4 * self.width, self.width))
                for _ in range(self.depth)
            )
        return model if device == "meta" else model.to_empty(device=device)


def write(job: Job) -> None:
    """The file that is loaded."""
    torch.manual_seed(0)
    model = job.build("cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_()
    safetensors.torch.save_file(dict(model.state_dict()), job.file)


def load_file(job: Job, rank: int, mesh: Any) -> Step:
    """What one does without dpzoo."""
    model = job.build("cpu")

    def step() -> Any:
        model.load_state_dict(safetensors.torch.load_file(job.file))
        return _outcome(model)

    return step


def whole(job: Job, rank: int, mesh: Any) -> Step:
    """Every rank holds all."""
    return _loading(job, job.build("cpu"), mesh)


def fsdp(job: Job, rank: int, mesh: Any) -> Step:
    """Every parameter is cut in two."""
    model = job.build("meta")
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _loading(job, model.to_empty(device="cpu"), mesh)


def spatial(job: Job, rank: int, mesh: Any) -> Step:
    """The position embedding is cut as the grid is."""
    model = job.build("meta")
    shape = (job.tokens // RANKS, job.width)
    model.pos_embed = None
    model.to_empty(device="cpu")
    local = torch.empty(shape)
    shapes = {0: (torch.Size(shape),) * RANKS}
    model.pos_embed = nn.Parameter(ShardTensor.from_local(local, mesh, [Shard(0)], sharding_shapes=shapes))
    return _loading(job, model, mesh)


def _loading(job: Job, model: nn.Module, mesh: Any) -> Step:
    def step() -> Any:
        load_pretrained(model, job.file, mesh=mesh)
        return _outcome(model)

    return step


def _outcome(model: nn.Module) -> tuple[int, float]:
    """Bytes that this rank holds, and a number that depends on the values."""
    local = [getattr(p, "_local_tensor", p).detach() for p in model.parameters()]
    return sum(t.nbytes for t in local), float(local[-1].view(-1)[0])


SETTINGS = [
    Setting("load_file", load_file, RANKS),
    Setting("whole", whole, RANKS),
    Setting("fsdp", fsdp, RANKS),
    Setting("spatial", spatial, RANKS),
]


def main() -> None:
    """Parse, measure, print, write."""
    import json

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a file of 100 MB, one round")
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "load_weights.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.safetensors"
        job = Job(file, 8192, 2) if options.quick else Job(file, 114_688, 16)
        write(job)
        rounds = measure(SETTINGS, job, options.rounds or (1 if options.quick else 5))
        size = file.stat().st_size
    table = {}
    print(f"{size / 1e6:.0f} MB, {RANKS} gloo ranks, torch {torch.__version__}, {os.cpu_count()} cores")
    print(f"{'':<12}{'wall s':>9}{'MB/s':>8}{'share MB':>10}{'peak MB':>10}{'above MB':>10}")
    for name in rounds[0]:
        samples = [sample for turn in rounds for sample in turn[name]]
        wall = statistics.median(max(s.wall for s in turn[name]) for turn in rounds)
        share = max(s.value[0] for s in samples) / 1e6
        peak = max(s.memory for s in samples) / 1e6
        table[name] = {"wall_s": wall, "share_mb": share, "peak_mb": peak, "above_mb": peak - share}
        print(f"{name:<12}{wall:>9.2f}{size / 1e6 / wall:>8.0f}{share:>10.0f}{peak:>10.0f}{peak - share:>10.0f}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"bytes": size, "ranks": RANKS, "settings": table}, indent=1))


if __name__ == "__main__":
    main()
