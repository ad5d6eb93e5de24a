"""Stopping early, after the current step: a signal and a time limit lose nothing."""

import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import Self

from tqdm import tqdm

from flowgrpo_rc.distributed.child import is_child, is_first

# A user's, a closed terminal's, and Slurm's before its time limit.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
# Only these end a process when they come again. The others come by themselves, also twice, and with
# a SIGTERM after them: a closed terminal sends two SIGHUP, and Slurm a SIGTERM at its limit.
_URGENT = (signal.SIGTERM, signal.SIGINT)
_SAID = "stopping after this step; again to end now"
EXIT_STOPPED = 75  # EX_TEMPFAIL: the state is saved, and the same command goes on


class StopRequest:
    """A context in which signals are requests, but for a second SIGTERM or SIGINT.

    SIGHUP stays ignored if it is, as under nohup. In a thread, to which Python gives no signals,
    only the time limit and `ask` are requests.
    """

    def __init__(self, max_time: float | None, *, at_once: bool = False) -> None:
        """Starts the clock; with `at_once` a second SIGTERM or SIGINT ends the process."""
        self._deadline = None if max_time is None else time.monotonic() + max_time
        self._at_once = at_once
        self._asked: str | None = None
        self._previous: dict[signal.Signals, signal.Handlers | int | None] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self
        for number in SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue
            self._previous[number] = signal.signal(number, self._receive)  # type: ignore[assignment]
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # a launcher may have blocked them
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

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
        if number in _URGENT:
            _say_stopping()
            for urgent in _URGENT:
                signal.signal(urgent, signal.SIG_DFL if self._at_once else self._previous[urgent])


def _say_stopping() -> None:
    """Tells the user, of several processes once, that a signal has come."""
    if is_child() or not is_first():
        return
    try:
        tqdm.write(_SAID, file=sys.stderr)  # above a progress bar, if there is one
    except RuntimeError:  # the signal came while something was written there
        os.write(2, f"{_SAID}\n".encode())
