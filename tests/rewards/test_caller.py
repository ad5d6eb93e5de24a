"""Calls with a limit: in one thread, one at a time, and given up."""

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import CancelledError

import pytest

from flowgrpo_rc.rewards.caller import Caller


def test_calls_go_to_one_thread_and_raise_what_the_function_raises() -> None:
    caller = Caller(lambda: threading.current_thread(), None, name="mine")
    threads = {caller() for _ in range(3)}
    assert [thread.name for thread in threads] == ["mine"]
    caller.close(0)
    (thread,) = threads
    assert not thread.is_alive()  # or it might free a C++ library while the process ends
    caller = Caller(sys.exit, 10, name="exits")
    with pytest.raises(SystemExit, match="3"):
        caller(3)
    caller.close(0)


def test_a_timeout_of_the_function_s_own_gives_nothing_up() -> None:
    def late() -> None:
        raise TimeoutError("the server is slow")

    caller = Caller(late, 10, name="late")
    for _ in range(2):
        with pytest.raises(TimeoutError, match="the server is slow"):
            caller()
    caller.close(0)


def test_closing_waits_for_a_call_but_not_for_ever() -> None:
    said: list[object] = []

    def call(caller: Caller, *arguments: float) -> None:
        try:
            said.append(caller(*arguments))
        except CancelledError:
            said.append("cancelled")

    def closed(patience_s: float) -> float:
        caller = Caller(lambda seconds: time.sleep(seconds) or seconds, None, name="sleeps")
        threads = [threading.Thread(target=call, args=(caller, 1.0)) for _ in range(2)]
        threads[0].start()
        time.sleep(0.1)
        threads[1].start()  # waits for its turn
        start = time.monotonic()
        caller.close(patience_s)
        took = time.monotonic() - start
        for thread in threads:
            thread.join(10)
        return took

    assert closed(0.0) < 0.5
    assert said == ["cancelled", "cancelled"]
    said.clear()
    assert closed(10.0) > 0.2
    assert said[0] == 1.0
