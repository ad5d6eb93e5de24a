"""Stopping early, after the current step: SIGTERM, SIGINT and a time limit lose nothing."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Self

SIGNALS = (signal.SIGTERM, signal.SIGINT)
EXIT_STOPPED = 75  # EX_TEMPFAIL: the state is saved, and the same command goes on


class StopRequest:
    """A context: the first SIGTERM or SIGINT is a request, a second one ends the process.

    In a thread, to which Python gives no signals, only the time limit and `ask` are requests.
    """

    def __init__(self, max_time: float | None) -> None:
        """Starts the clock; `max_time` is in seconds, None for no limit."""
        self._deadline = None if max_time is None else time.monotonic() + max_time
        self._asked: str | None = None
        self._previous: dict[signal.Signals, signal.Handlers | int | None] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self
        for number in SIGNALS:
            self._previous[number] = signal.signal(number, self._receive)  # type: ignore[assignment]
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # a launcher may have blocked them
        return self

    def __exit__(self, *error: object) -> None:
        self._restore()

    def ask(self, reason: str) -> None:
        """Asks the run to stop after the present step."""
        self._asked = reason

    def reason(self) -> str | None:
        """Returns why the run should stop now, or None."""
        if self._asked is not None:
            return self._asked
        if self._deadline is not None and time.monotonic() >= self._deadline:
            return "trainer.max_time is over"
        return None

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.ask(signal.Signals(number).name)
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
