"""Commands and processes that tests start.

A Python program starts as a fork of a process that has imported torch and diffusers: an import
costs more than a small run.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any

from support.documented import ROOT

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["flowgrpo_rc.assembly.run", "flowgrpo_rc.commands.train"])
# A stand-in of Slurm's command for a job on two nodes, both on this machine.
SCONTROL = """#!/bin/sh
case "$1" in
    show) printf '127.0.0.1\\nother\\n' ;;
    requeue) echo "$2" >> requeued ;;
esac
"""


def launch(
    num_processes: int, *arguments: str, python_path: Path | None = None, code: int | None = 0
) -> subprocess.CompletedProcess:
    """Runs `python ARGUMENTS` in gloo processes of one thread each, as torchrun would.

    One that fails ends the others.

    Args:
      num_processes: how many.
      arguments: those of python.
      python_path: a folder of modules besides this checkout.
      code: the exit code that is expected; None for any.
    """
    shared = launch_environment(python_path) | {
        "WORLD_SIZE": str(num_processes),
        "LOCAL_WORLD_SIZE": str(num_processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    ranks = [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_processes)]
    return _run_forks(arguments, ranks, code)


def _run_forks(
    arguments: Sequence[str], environments: Sequence[Mapping[str, str]], code: int | None
) -> subprocess.CompletedProcess:
    """Runs a Python program once for each environment; returns the first code that is not 0."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "stdout"), Path(folder, "stderr")
        forks = [
            _FORKS.Process(target=_become, args=(arguments, dict(environment), output))
            for environment in environments
        ]
        for fork in forks:
            fork.start()
        deadline, failed = time.monotonic() + 900, 0
        while running := [fork.sentinel for fork in forks if fork.is_alive()]:
            if not connection.wait(running, deadline - time.monotonic()):
                break
            codes = [fork.exitcode for fork in forks if fork.exitcode]
            if codes and not failed:
                failed, deadline = codes[0], time.monotonic() + 5  # the others say what they miss
        for fork in forks:
            fork.kill()
            fork.join()
        assert failed or not running, f"timed out: {arguments}"
        stdout, stderr = (path.read_text() for path in output)
    assert code in (None, failed), f"exit code {failed}: {stderr[-3000:]}"
    return subprocess.CompletedProcess(arguments, failed, stdout, stderr)


def _become(
    arguments: Sequence[str], environment: Mapping[str, str], output: tuple[Path, Path]
) -> None:
    """Turns a fork into `python ARGUMENTS`, which prints into two files."""
    for number, path in enumerate(output, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)
    os.environ.clear()
    os.environ.update(environment)
    gc.set_threshold(20_000, 10, 20)  # as in conftest.py
    sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)
    if arguments[0] == "-m":
        sys.argv = list(arguments[1:])
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(arguments)
        runpy.run_path(arguments[0], run_name="__main__")


def launch_environment(*folders: Path | None) -> dict[str, str]:
    """Returns an environment with one thread to a process.

    Modules come from this checkout and `folders`.
    """
    paths = [str(folder) for folder in (ROOT, *folders) if folder is not None]
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}


def train_command(
    *overrides: str, python_path: Path | None = None, code: int | None = 0
) -> subprocess.CompletedProcess:
    """Runs the training command, which no launcher has started."""
    words = ("-m", "flowgrpo_rc.train", *overrides)
    return run_alone(*words, python_path=python_path, code=code)


def run_alone(
    *arguments: str, python_path: Path | None = None, code: int | None = 0
) -> subprocess.CompletedProcess:
    """Runs `python ARGUMENTS`, which no launcher has started."""
    return _run_forks(arguments, [alone(python_path)], code)


def alone(*folders: Path | None) -> dict[str, str]:
    """Returns an environment without a launcher."""
    environment = launch_environment(*folders)
    return {name: value for name, value in environment.items() if name != "WORLD_SIZE"}


def ran(*command: str | Path, timeout: float = 900, **options: Any) -> subprocess.CompletedProcess:
    """Runs a program to its end, whatever its exit code; what it prints is kept as text."""
    kept: dict[str, Any] = {"capture_output": True, "text": True, "check": False}
    return subprocess.run(command, timeout=timeout, **kept, **options)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(condition: Callable[[], bool], timeout_s: float = 120) -> None:
    """Waits until the condition holds; fails after `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)


def no_process_of(run: Path) -> bool:
    """Returns whether no process of this machine has the run's folder on its command line."""
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    return not any(str(run).encode() in command for command in commands)


def marked(mark: str) -> list[int]:
    """Returns the processes in whose environment a text stands."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue  # it has ended
    return found


def all_gone(mark: str, seconds: float = 120) -> bool:
    """Waits for the end of the processes in whose environment a text stands."""
    deadline = time.monotonic() + seconds
    # Ray's agents look for their parent once a minute.
    while marked(mark) and time.monotonic() < deadline:
        time.sleep(0.2)
    return not marked(mark)
