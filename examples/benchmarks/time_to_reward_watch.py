"""Clocks of a training program, read from outside it while it runs.

The program appends a line to a file after every iteration. The clocks are read as soon as a line is
there, so what is measured needs no change for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

POLL_SECONDS = 0.02
FAILED = 2000  # characters of the output that an error shows


class Reading(NamedTuple):
    """The clocks of a program at the end of an iteration.

    Attributes:
      step: the iteration; 0 stands for the state before the first.
      cpu: CPU seconds since the program started, of all its processes and threads.
      wall: seconds of any one clock.
    """

    step: int
    cpu: float
    wall: float


class Watched(NamedTuple):
    """Holds what was seen of a program.

    Attributes:
      readings: one for each iteration, and one before the first.
      peak_memory_gib: the largest resident memory of the program or of one of its children.
    """

    readings: list[Reading]
    peak_memory_gib: float


def cpu_seconds(process: psutil.Process) -> float:
    """Returns the CPU seconds of a process and of its descendants, ended ones included."""
    total = 0.0
    for each in (process, *process.children(recursive=True)):
        # A descendant may end between its listing and its reading; its parent then has its time.
        with contextlib.suppress(psutil.NoSuchProcess):
            times = each.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def watch(command: Sequence[str], rows: Path, environment: Mapping[str, str]) -> Watched:
    """Runs a program and reads its clocks whenever it has written a line.

    Args:
      command: the program and its arguments.
      rows: a file of JSON lines with the key `step`. The program creates it and adds to it.
      environment: the program's environment variables.

    Returns:
      The readings.

    Raises:
      RuntimeError: the program failed; the message holds the end of its output.
    """
    readings: list[Reading] = []
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            command, env=dict(environment), stdout=said, stderr=subprocess.STDOUT
        )
        seen = psutil.Process(process.pid)
        while True:
            # wait4 gives the usage of this program alone.
            ended, status, usage = os.wait4(process.pid, os.WNOHANG)
            if ended:
                break
            steps = _steps(rows)[len(readings) :]
            if steps:
                readings += _read(seen, steps)
            time.sleep(POLL_SECONDS)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != 0 or len(_steps(rows)) != len(readings):
            said.seek(0)
            raise RuntimeError(f"{' '.join(command)} failed:\n{said.read()[-FAILED:]}")
    return Watched(readings, usage.ru_maxrss / 2**20)


def _read(process: psutil.Process, steps: Sequence[int]) -> list[Reading]:
    cpu = cpu_seconds(process)
    wall = time.perf_counter()
    return [Reading(step, cpu, wall) for step in steps]


def _steps(rows: Path) -> list[int]:
    """Reads the iterations of the complete lines."""
    if not rows.is_file():
        return []
    *lines, _ = rows.read_text().split("\n")
    return [int(json.loads(line)["step"]) for line in lines]
