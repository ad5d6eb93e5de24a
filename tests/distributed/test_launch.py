"""Processes that `launch` starts: exit codes, messages, signals, and the end of the launcher."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.engine_children import gone
from support.launching import launch_environment, wait_for

from flowgrpo_rc.distributed.launch import launch
from flowgrpo_rc.distributed.stopping import SIGNALS, StopRequest

Script = Callable[[str], tuple[str, ...]]


@pytest.fixture(autouse=True)
def _signals_are_heard() -> Iterator[None]:
    """The background of a shell ignores SIGINT, nohup ignores SIGHUP, and children ignore both."""
    heard = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in heard.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("codes", "expected"),
    [((0, 0), 0), ((0, 75), 75), ((1, 0), 1), ((75, 3), 3)],
)
def test_exit_codes_come_through(script: Script, codes: tuple[int, int], expected: int) -> None:
    code = f"import os, sys; sys.exit({codes}[int(os.environ['RANK'])])"
    assert launch(script(code), 2) == expected


ENVIRONMENT = """
import os, sys
expected = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
assert {name: os.environ[name] for name in expected} == expected
assert os.environ["MASTER_ADDR"] == "127.0.0.1"
assert os.getsid(0) == os.getpid()
sys.exit(10 + int(os.environ["OMP_NUM_THREADS"]))
"""


@pytest.mark.parametrize(("threads", "expected"), [(None, 11), ("3", 13)])
def test_children_know_their_place(script, monkeypatch, threads, expected):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if threads is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
    assert launch(script(ENVIRONMENT), 1) == expected


TALKING = """
import os, subprocess, sys
from flowgrpo_rc.distributed.child import is_child, say_error
assert is_child()
subprocess.check_call([sys.executable, "-c", "import sys; from flowgrpo_rc.distributed.child "
    "import is_child, say_error; say_error('a grandchild speaks'); sys.exit(is_child())"])
say_error("error: both say this")
sys.exit(2)
"""


def test_what_several_children_say_is_printed_once(script, capfd):
    assert launch(script(TALKING), 2) == 2
    assert sorted(capfd.readouterr().err.splitlines()) == [
        "a grandchild speaks",
        "a grandchild speaks",
        "error: both say this",
    ]


# A child that is slow to start; its exit code says whether it got one signal, and which.
STOPPING = """
import os, signal, sys, time
from pathlib import Path
Path(f"started_{os.environ['RANK']}").touch()
time.sleep(0.5)
received = []
numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
for number in numbers:
    signal.signal(number, lambda number, frame: received.append(number))
signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
while not received:
    time.sleep(0.01)
time.sleep(0.5)
sys.exit(75 if received == [int(sys.argv[1])] else 9)
"""


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_reaches_each_child_once_however_early(script, tmp_path, monkeypatch, number):
    monkeypatch.chdir(tmp_path)

    def send() -> None:
        wait_for(lambda: all(Path(f"started_{rank}").exists() for rank in range(2)))
        os.kill(os.getpid(), number)

    sender = threading.Thread(target=send)
    sender.start()
    assert launch((*script(STOPPING), str(int(number))), 2) == 75
    sender.join()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()


def test_a_second_signal_is_the_program_s_own_unless_it_shall_end_at_once() -> None:
    with StopRequest(None) as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.reason() == "SIGINT"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    with StopRequest(None, at_once=True):
        os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler


LAUNCHING = """
import sys
from flowgrpo_rc.distributed.launch import launch
from flowgrpo_rc.distributed.stopping import SIGNALS, StopRequest
sys.exit(launch([sys.executable, *sys.argv[1:]], 2))
"""
STUBBORN = """
import os, signal, time
from pathlib import Path
from flowgrpo_rc.distributed.child import follow_parent
follow_parent()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGINT))
Path(f"new_{os.environ['RANK']}").write_text(str(os.getpid()))
Path(f"new_{os.environ['RANK']}").rename(f"pid_{os.environ['RANK']}")
time.sleep(300)
"""


@pytest.mark.parametrize("signals", [(signal.SIGKILL,), (signal.SIGINT, signal.SIGINT)])
def test_children_do_not_outlive_their_launcher(script, tmp_path, signals):
    """It is killed, or gets a second signal; the signals go to its group, as Ctrl-C does."""
    _, child = script(STUBBORN)
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHING, child],
        cwd=tmp_path,
        env=launch_environment(),
        start_new_session=True,
        stderr=subprocess.DEVNULL,
    )
    files = [tmp_path / f"pid_{rank}" for rank in range(2)]
    wait_for(lambda: all(path.exists() for path in files))
    for number in signals:
        os.killpg(launcher.pid, number)
        time.sleep(0.5)  # the second signal is not merged with the first
    assert launcher.wait(timeout=60) != 0
    assert all(gone(int(path.read_text())) for path in files)
