"""Read samples ahead of their use, in threads or spawned processes (nothing is forked: zarr and HDF5 are safe)."""

import multiprocessing
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")
Step = TypeVar("Step")


def read_ahead(
    steps: Sequence[Step], submit: "Callable[[Step], Future[T]]", prefetch: int
) -> "Generator[tuple[Step, Future[T]], None, None]":
    """Each step with its future, in order, while `prefetch` more are under way; close it to cancel what is left."""
    waiting: deque[Future[T]] = deque()
    try:
        for number, step in enumerate(steps):
            for later in steps[number + len(waiting) : number + 1 + prefetch]:
                waiting.append(submit(later))
            yield step, waiting.popleft()
    finally:
        for future in waiting:
            future.cancel()


class _Inline(Executor):
    """Reads at once, in the calling thread."""

    def submit(self, fn, /, *args, **kwargs):  # type: ignore[no-untyped-def]
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


def make_executor(kind: str, workers: int) -> Executor:
    """`workers` threads or spawned processes; 0 reads in the calling thread, when asked."""
    if workers == 0:
        return _Inline()
    if kind == "thread":
        return ThreadPoolExecutor(workers, thread_name_prefix="dpzoo-read")
    return ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
