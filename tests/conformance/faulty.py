"""A target with a fault of each kind, to show that the runner sees it: prints ``fault outcome`` lines.

Run as a process of its own (``python -m tests.conformance.faulty``), since a pool must fork from a clean parent.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.conformance.catalog import entries
from tests.conformance.pool import Pool
from tests.conformance.targets import TARGETS, DTensorTarget
from tests.conformance.worker import Selection

FAULTS = ("none", "value", "gradient", "one-rank", "one-rank-waits", "hang", "everywhere", "refuses", "dies")


class FaultyTarget(DTensorTarget):
    """DTensor with the fault named by ``fault``."""

    fault = "none"

    def shard(self, full: torch.Tensor, dim: int, sizes: tuple[int, ...], requires_grad: bool) -> torch.Tensor:
        last = self.rank == self.mesh.size() - 1
        if self.fault == "everywhere" or (last and self.fault.startswith("one-rank")):
            raise ZeroDivisionError("made for the test")
        if self.fault == "refuses":
            raise NotImplementedError("made for the test")
        if self.fault == "one-rank-waits" or (last and self.fault == "hang"):
            dist.barrier()
        if last and self.fault == "dies":
            raise SystemExit(3)
        return super().shard(full * (1.5 if self.fault == "value" else 1.0), dim, sizes, requires_grad)

    def like(self, full: torch.Tensor, model: torch.Tensor) -> torch.Tensor:
        return super().like(full * (1.5 if self.fault == "gradient" else 1.0), model)


def outcome_of(fault: str, entry: Any) -> str:
    """The outcome of the entry's first case on two ranks of a target with ``fault``."""
    FaultyTarget.fault = fault
    TARGETS["faulty"] = FaultyTarget
    pool = Pool("faulty", 2, {entry.key: entry}, timeout=20.0, idle=0.7)
    try:
        return next(iter(pool.run(entry, Selection(1, 1, ("even",), frozenset()))))["outcome"]
    finally:
        pool.stop()


if __name__ == "__main__":
    exp = next(entry for entry in entries() if entry.key == "exp|op")
    for name in FAULTS:
        print(name, outcome_of(name, exp), flush=True)
