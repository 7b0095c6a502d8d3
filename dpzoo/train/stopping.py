"""SIGTERM, which a scheduler sends before it takes the machine away, becomes a question that the loop asks."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class StopSignal:
    """Inside the block the signals set a flag instead of ending the process.

    Outside the main thread Python cannot install handlers; the flag then stays down.
    """

    def __init__(self, *signals: signal.Signals) -> None:
        self.requested = False
        self._signals = signals or (signal.SIGTERM,)
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopSignal":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._set) for number in self._signals}
        return self

    def _set(self, number: int, frame: FrameType | None) -> None:
        self.requested = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
