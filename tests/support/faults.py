"""Names faults, and runs commands in forked processes that a test may harm.

A fork starts with all libraries imported, so that a run of the random checkpoint takes about a
second. Nothing may train in the parent: a fork of threads is none.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NamedTuple

import pytest
from safetensors.torch import load_file
from support.runs import State, num_rows

from flowgrpo_rc.records.checkpoint import list_checkpoints, not_finite

Harm = Callable[[], None]


class Trained(NamedTuple):
    """A finished run: its folder, what it has come to, and how often it has changed a file."""

    folder: Path
    state: State
    changes: int


# Every how many of the generated faults are taken; 1 takes them all.
EVERY = int(os.environ.get("FAULTS_EVERY", "43"))


def mixed(*kinds: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Returns combinations in which each of some kinds comes up; all of them if `EVERY` is 1."""
    given = [list(kind) for kind in kinds]
    if EVERY == 1:
        return list(itertools.product(*given))
    in_turn = zip(*map(itertools.cycle, given), strict=False)
    return list(itertools.islice(in_turn, max(map(len, given))))


def some(cases: Sequence[Any], number: int = 1) -> Sequence[Any]:
    """Returns the first cases of a kind; all of them if `EVERY` is 1."""
    return cases if EVERY == 1 else cases[:number]


# Events of Python's audit hooks that change files. "open" is one only for writing.
_CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "shutil.rmtree")


def fault(harm: str, outcome: str) -> pytest.MarkDecorator:
    """Marks a test with what is done to the run and what then happens, in the present tense."""
    return pytest.mark.fault(harm, outcome)


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process ended: its exit code, or minus the signal that killed it, and its output."""

    code: int
    output: str
    seconds: float

    def expect(self, code: int, *words: str) -> Ended:
        """Fails unless it ended with this code and these words, and without a traceback."""
        assert self.code == code, self.output
        assert "Traceback" not in self.output, self.output
        for text in words:
            assert text in self.output, self.output
        return self

    def error(self) -> str:
        (line,) = [line for line in self.output.splitlines() if line.startswith("error: ")]
        return line


def command(*words: str, harm: Harm | None = None, timeout: float = 120) -> Ended:
    """Runs `flowgrpo-rc WORDS` in a fork, in which `harm` is called before."""
    from flowgrpo_rc.cli import main

    def run() -> int:
        if harm is not None:
            harm()
        return main(words)

    return forked(run, timeout=timeout)


def forked(run: Callable[[], int], *, timeout: float = 120) -> Ended:
    """Calls a function in a fork, and returns how the fork ended; see `started`."""
    with started(run, timeout=timeout) as process:
        return process.wait()


@contextlib.contextmanager
def started(run: Callable[[], int], *, timeout: float = 120) -> Iterator[Started]:
    """Starts a function in a fork with an output of its own, and kills it at the end.

    It returns the fork's exit code. An exception is printed, and the code is 1.
    """
    with TemporaryFile() as output:
        with warnings.catch_warnings():
            # The parent's other threads are those of the test runner, which the fork never calls.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            _become(run, output.fileno())
        process = Started(pid, output.fileno(), timeout)
        try:
            yield process
        finally:
            process.kill()


class Started:
    def __init__(self, pid: int, output: int, timeout: float) -> None:
        self.pid = pid
        self._output = output
        self._timeout = timeout
        self._start = time.monotonic()
        self._ended: Ended | None = None

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def wait(self) -> Ended:
        """Returns how it ended; fails after the timeout, with what it has printed."""
        while self.poll() is None:
            if time.monotonic() - self._start > self._timeout:
                self.kill()
                pytest.fail(f"still running after {self._timeout} s:\n{self.output()}")
            time.sleep(0.01)
        assert self._ended is not None
        return self._ended

    def wait_until(self, condition: Callable[[], bool]) -> bool:
        """Waits until a condition holds; returns False if the process ends first."""
        while not condition():
            if self.poll() is not None:
                return condition()
            time.sleep(0.01)
        return True

    def wait_for_rows(self, run: Path, number: int) -> bool:
        """Waits until metrics.jsonl has so many rows; returns False if the process ends first."""
        return self.wait_until(lambda: num_rows(run) >= number)

    def poll(self) -> Ended | None:
        """Returns how it ended, or None while it runs."""
        if self._ended is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                code = os.waitstatus_to_exitcode(status)
                self._ended = Ended(code, self.output(), time.monotonic() - self._start)
        return self._ended

    def output(self) -> str:
        size = os.fstat(self._output).st_size
        return os.pread(self._output, size, 0).decode(errors="replace")

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self._ended = Ended(-signal.SIGKILL, self.output(), time.monotonic() - self._start)


def _become(run: Callable[[], int], output: int) -> None:
    """Makes the fork a process of its own kind: its output, default signals, no clean-up."""
    code = 1
    try:
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr
        logging.root.handlers.clear()  # those of the test runner would take the warnings
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, default)
        code = run()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def on_change(folder: Path, act: Callable[[int], None]) -> Harm:
    """Returns a harm that calls `act` before each of the file system's changes below a folder.

    It gets the number of the change, from 0; what it raises, the change raises.
    """

    def install() -> None:
        numbers = itertools.count()

        def hook(event: str, arguments: tuple[object, ...]) -> None:
            if _changes(event, arguments, folder):
                act(next(numbers))

        sys.addaudithook(hook)

    return install


def at_change(folder: Path, number: int, act: Callable[[], None]) -> Harm:
    """Returns a harm that acts at one change below a folder; see `on_change`."""
    return on_change(folder, lambda seen: act() if seen == number else None)


def die() -> None:
    """Kills this process, as the kernel does for want of memory."""
    os.kill(os.getpid(), signal.SIGKILL)


def _changes(event: str, arguments: tuple[object, ...], folder: Path) -> bool:
    if event == "open":
        path, mode, flags = arguments
        writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR)
        if not writes and not (isinstance(mode, str) and set(mode) & set("wax+")):
            return False
    elif event in _CHANGES:
        path = arguments[0]
    else:
        return False
    return isinstance(path, str | os.PathLike) and str(path).startswith(str(folder))


def nth_call(owner: type, name: str, number: int, change: Callable[..., Any]) -> Harm:
    """Returns a harm that changes what the `number`th call of a method leaves; -1: every call."""

    def install() -> None:
        original = getattr(owner, name)
        calls = 0

        def called(self: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            found = original(self, *args, **kwargs)
            return change(self, found) if number in (calls, -1) else found

        setattr(owner, name, called)

    return install


def recorded(change: Callable[[Any], dict[str, Any]]) -> Callable[[Any, Any], Iterator[Any]]:
    """Returns a change of an engine's `generate`: batches have other fields."""

    def changed(engine: Any, chunks: Iterator[Any]) -> Iterator[Any]:
        for chunk in chunks:
            yield replace(chunk, batch=chunk.batch.replace(**change(chunk.batch)))

    return changed


def sizes(pid: int) -> tuple[float, int]:
    """Returns the resident memory of a process in MiB, and how many files it holds open."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20, len(os.listdir(f"/proc/{pid}/fd"))


def has_nan(run: Path) -> list[str]:
    """Returns the weights, moments and averages of a run's checkpoints that are not finite."""
    found = []
    for path in list_checkpoints(run / "checkpoints"):
        stems = ("lora", "optimizer", "ema")
        tensors = {stem: load_file(path / f"{stem}.safetensors") for stem in stems}
        found += [f"{path.name}/{name}" for name in not_finite(tensors)]
    return found


def replace_file(checkpoint: Path, name: str, change: Callable[[Path], None]) -> None:
    """Changes a file of a checkpoint, and its sum in the manifest."""
    change(checkpoint / name)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest[name] = hashlib.sha256((checkpoint / name).read_bytes()).hexdigest()
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


def words_of(overrides: Sequence[str], *further: str) -> list[str]:
    """Returns the words of a training; later settings replace earlier ones of the same key."""
    by_key = {word.partition("=")[0]: word for word in (*overrides, *further)}
    return ["train", *by_key.values()]
