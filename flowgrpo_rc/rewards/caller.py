"""Calls a reward in a thread of its own, and gives a call up that does not return."""

import sys
import traceback
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from queue import SimpleQueue
from threading import Lock, Thread
from types import TracebackType
from typing import Generic, TypeVar

Result = TypeVar("Result")
FIRST = 3  # how much longer the first call may take
# Where the frames of a call begin, and which of them are the last before code of the user.
_BEFORE = ("flowgrpo_rc.", "concurrent.")
_LAST_BEFORE = ("flowgrpo_rc.rewards.function", "flowgrpo_rc.rewards.caller")


def users_part(error: BaseException) -> TracebackType | None:
    """Returns the traceback of a call that failed from the user's code on; None without any."""
    trace = error.__traceback__
    before = ""
    while trace and (name := trace.tb_frame.f_globals.get("__name__", "")).startswith(_BEFORE):
        trace = trace.tb_next
        before = name
    return trace if before in _LAST_BEFORE else None


class Caller(Generic[Result]):
    """Calls a function in one thread, one call at a time and none for longer than a limit.

    The first call, in which a reward may fetch and load its model, has three times as long.

    Python cannot end a thread. A call that was given up goes on in it, and until it returns every
    further one fails at once. It is a daemon thread, for which the process does not wait at its
    end: `close` does. If it were still to call or free a library in C++ then, the process could
    abort.

    `timeout_s` is None for no limit; `name` is that of the thread.
    """

    def __init__(
        self, function: Callable[..., Result], timeout_s: float | None, *, name: str
    ) -> None:
        self._function = function
        self._timeout_s = timeout_s
        self._returned = False
        self._turn = Lock()  # held as long as somebody waits for a call
        self._calls: SimpleQueue[tuple[Future[Result], tuple[object, ...]] | None] = SimpleQueue()
        self._given_up: Future[Result] | None = None
        self._closed: Future[Result] = Future()
        self._thread = Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def __call__(self, *arguments: object) -> Result:
        """Calls the function and returns its result, or raises what it raises.

        Raises:
          TimeoutError: this call takes too long, or an earlier one that was given up still runs.
          CancelledError: the caller was closed.
        """
        with self._turn:
            if self._given_up is not None and not self._given_up.done():
                raise TimeoutError(
                    "an earlier call, which was given up after "
                    f"reward.timeout_s={self._timeout_s:g}, has not returned yet"
                )
            answer: Future[Result] = Future()
            self._calls.put((answer, arguments))
            limit_s = self._timeout_s
            if limit_s is not None and not self._returned:
                limit_s *= FIRST
            wait([answer, self._closed], limit_s, FIRST_COMPLETED)
            for ended in (answer, self._closed):
                if ended.done():
                    self._returned = True
                    return ended.result()
            self._given_up = answer
            late = TimeoutError(f"the call took longer than reward.timeout_s={self._timeout_s:g}")
            frame = sys._current_frames().get(self._thread.ident or 0)
            late.add_note(f"It is here:\n{''.join(traceback.format_stack(frame))}")
            raise late

    def close(self, patience_s: float) -> None:
        """Ends the thread and waits for it, but not for a call that was given up.

        After `patience_s` seconds the call ends with CancelledError.
        """
        ended = self._turn.acquire(timeout=patience_s)
        self._closed.set_exception(CancelledError())
        self._calls.put(None)
        if ended:
            self._turn.release()
            if self._given_up is None or self._given_up.done():
                self._thread.join()

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            answer, arguments = call
            try:
                answer.set_result(self._function(*arguments))
            # In a thread, SystemExit and the like mean the call, and not the process.
            except BaseException as error:
                answer.set_exception(error)
            del call, answer, arguments  # or its samples would stay until the next one
