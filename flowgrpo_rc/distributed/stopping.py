"""Stopping early, after the current step: SIGTERM, SIGINT and a time limit lose nothing."""

from __future__ import annotations

import signal
import time
from types import FrameType
from typing import Self

SIGNALS = (signal.SIGTERM, signal.SIGINT)
EXIT_STOPPED = 75  # EX_TEMPFAIL: the state is saved, and the same command goes on


class StopRequest:
    """A context: the first SIGTERM or SIGINT is a request, a second one ends the process."""

    def __init__(self, max_time: float | None) -> None:
        """Starts the clock; `max_time` is in seconds, None for no limit."""
        self._deadline = None if max_time is None else time.monotonic() + max_time
        self._signal: str | None = None
        self._previous: dict[signal.Signals, signal.Handlers | int | None] = {}

    def __enter__(self) -> Self:
        for number in SIGNALS:
            self._previous[number] = signal.signal(number, self._receive)  # type: ignore[assignment]
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # a launcher may have blocked them
        return self

    def __exit__(self, *error: object) -> None:
        self._restore()

    def reason(self) -> str | None:
        """Returns why the run should stop now, or None."""
        if self._signal is not None:
            return self._signal
        if self._deadline is not None and time.monotonic() >= self._deadline:
            return "trainer.max_time is over"
        return None

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._signal = signal.Signals(number).name
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
