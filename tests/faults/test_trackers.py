"""Trackers, the console and pictures only tell of a run, and never end it."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
from support.faults import Harm, Trained, command, fault, some, words_of
from support.launching import alone, ran
from support.runs import final_state, read_rows

from flowgrpo_rc.records import samples


@pytest.fixture
def survives(small: list[str], tmp_path: Path, whole: Trained) -> Callable[..., str]:
    """Runs `small` with a harm that changes no result; returns what it has printed."""

    def run(harm: Harm, *further: str) -> str:
        ended = command(*words_of(small, *further), harm=harm).expect(0)
        assert final_state(tmp_path / "run") == whole.state
        return ended.output

    return run


def is_writing(event: str, arguments: tuple[object, ...], part: str) -> bool:
    """Returns whether an audit event opens a file, whose path has this part, for writing."""
    if event != "open" or part not in str(arguments[0]):
        return False
    flags = arguments[2]
    return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR))


def at_first_picture(act: Callable[[], None]) -> None:
    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if is_writing(event, arguments, "step_000000.png"):
            act()

    sys.addaudithook(hook)


NOISE = b"not for a file of the run"


def closes_streams() -> None:
    """Closes them, and later writes to the standard output as a library in C would."""
    for number in (0, 1, 2):
        os.close(number)
    sys.stdout = sys.stderr = sys.__stdout__ = sys.__stderr__ = None
    at_first_picture(lambda: os.write(1, NOISE))


def loses_its_reader() -> None:
    """Puts a pipe that nobody reads in the place of both streams."""
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)
    os.dup2(writer, 2)


def loses_its_terminal() -> None:
    """Puts a terminal in the place of both streams, and closes it after a few lines."""
    ours, theirs = os.openpty()
    os.dup2(theirs, 1)
    os.dup2(theirs, 2)
    os.close(theirs)
    at_first_picture(lambda: os.close(ours))


def is_full() -> None:
    """Puts a full pipe that does not wait in the place of both streams."""
    _, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b" " * 4096)
    os.dup2(writer, 1)
    os.dup2(writer, 2)


GONE = {
    "a full pipe that does not wait": is_full,
    "closed from the start": closes_streams,
    "pipes without a reader": loses_its_reader,
    "a terminal that closes": loses_its_terminal,
}


@fault("nobody can read what the run prints", "the run goes on in silence")
@pytest.mark.parametrize("how", some(list(GONE), 2))
def test_a_console_that_is_gone(survives, tmp_path: Path, how: str) -> None:
    assert survives(GONE[how]) == ""
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in files if NOISE in path.read_bytes()]


@fault("the reader of the output leaves, as in `| head -1`", "the run ends with exit code 0")
@pytest.mark.parametrize("processes", some([1, 2]))
def test_head(small: list[str], tmp_path: Path, processes: int) -> None:
    words = words_of(small, f"trainer.num_processes={processes}")[1:]
    script = '"$@" | head -n 1; exit "${PIPESTATUS[0]}"'
    program = (sys.executable, "-m", "flowgrpo_rc.train")
    done = ran("bash", "-c", script, "bash", *program, *words, env=alone(), timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == 1
    assert read_rows(tmp_path / "run")[-1]["step"] == 3
    assert (tmp_path / "run" / "report.html").is_file()


def full_for(part: str) -> Harm:
    """Returns a harm: the disk is full for files whose path has this part."""

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if is_writing(event, arguments, part):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return lambda: sys.addaudithook(hook)


def warnings_in(said: str) -> list[str]:
    return [line for line in said.splitlines() if line.startswith("WARNING")]


@fault("the disk is full for a picture", "one warning; the run is as without it")
def test_what_cannot_be_written(survives) -> None:
    (line,) = warnings_in(survives(full_for("run/samples/")))
    assert "cannot be written, and the run goes on without" in line
    assert "No space left on device" in line


@fault("a picture cannot be drawn", "one warning with a traceback; the run goes on")
def test_a_picture_that_cannot_be_drawn(small: list[str], tmp_path: Path, whole: Trained) -> None:
    def refuses_to_draw(*arguments: object, **options: object) -> NoReturn:
        raise MemoryError("too large")

    ended = command(*words_of(small), harm=lambda: setattr(samples, "image_grid", refuses_to_draw))
    assert ended.code == 0, ended.output
    assert final_state(tmp_path / "run") == whole.state
    (line,) = warnings_in(ended.output)
    assert "val/samples cannot be written" in line
    assert ended.output.count("Traceback") == 1
