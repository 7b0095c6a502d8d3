"""Read samples ahead of their use, in threads or spawned processes (nothing is forked: zarr and HDF5 are safe)."""

import multiprocessing
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self, TypeVar

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


class ReadsAhead:
    """A loader with workers: started at the first read, ended by `close` or with the `with` block.

    Attributes:
        prefetch: samples read ahead, 0 to read when asked.
    """

    def __init__(self, workers: str, prefetch: int) -> None:
        self.prefetch = prefetch
        self._workers = workers
        self._executor: Executor | None = None

    def _read(self, read: Callable[[Any], T], request: Any) -> "Future[T]":
        if self._executor is None:
            self._executor = make_executor(self._workers, self.prefetch)
        return self._executor.submit(read, request)

    def close(self) -> None:
        """End the workers."""
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)
            self._executor = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
