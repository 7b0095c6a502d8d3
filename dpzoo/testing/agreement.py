"""Compare notes over ranks without a collective, so that a rank that is missing is an error and not a hang."""

from __future__ import annotations

import itertools
import pickle
from collections import defaultdict
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

_tasks = itertools.count()
_task = next(_tasks)
_calls: defaultdict[tuple[int, ...], int] = defaultdict(int)


class Absent(RuntimeError):
    """Some ranks did not arrive in time. `present` maps each rank that did to what it brought."""

    def __init__(self, missing: Sequence[int], present: dict[int, Any], wait_s: float) -> None:
        self.missing, self.present = tuple(missing), present
        super().__init__(f"ranks {list(missing)} did not arrive within {wait_s:g} s; present: {present}")


def forget_calls() -> None:
    """Begin a new task: exchanges are numbered from zero again, whatever a failed task left behind."""
    global _task
    _task = next(_tasks)
    _calls.clear()


def exchange(value: object, ranks: Sequence[int] | None = None, wait_s: float = 5.0) -> dict[int, Any]:
    """Every rank of `ranks` (global numbers; default all) brings a value and gets {rank: value}.

    Goes through the rendezvous store: a rank that is inside a collective, or has failed, is named by `Absent`
    after `wait_s` seconds on the ranks that did come.
    """
    members = tuple(range(dist.get_world_size())) if ranks is None else tuple(ranks)
    store = dist.PrefixStore(f"dpzoo.testing/{_task}/{members}/{_calls[members]}", _get_default_store())
    _calls[members] += 1
    store.set(str(dist.get_rank()), pickle.dumps(value))  # type: ignore[arg-type]  # torch's stub omits bytes
    found: dict[int, Any] = {}
    missing: list[int] = []
    for rank in members:
        try:
            store.wait([str(rank)], timedelta(seconds=0.05 if missing else wait_s))
            found[rank] = pickle.loads(store.get(str(rank)))
        except RuntimeError:
            missing.append(rank)
    if missing:
        raise Absent(missing, found, wait_s)
    return found
