"""Commands and processes that tests start."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from support.documented import ROOT


def launch(
    num_processes: int, *arguments: str, python_path: Path | None = None
) -> subprocess.CompletedProcess:
    """Runs torchrun with `num_processes` gloo processes of one thread each."""
    launcher = [
        "torch.distributed.run",
        f"--nproc_per_node={num_processes}",
        f"--master_port={free_port()}",
    ]
    command = [sys.executable, "-m", *launcher, *arguments]
    environment = launch_environment(python_path)
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=900, check=False
    )


def launch_environment(*folders: Path | None) -> dict[str, str]:
    """Returns an environment with one thread to a process.

    Modules come from this checkout and `folders`.
    """
    paths = [str(folder) for folder in (ROOT, *folders) if folder is not None]
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}


def train_command(*overrides: str, python_path: Path | None = None) -> subprocess.CompletedProcess:
    """Runs the training command, which no launcher has started."""
    return subprocess.run(
        [sys.executable, "-m", "flowgrpo_rc.train", *overrides],
        env=alone(python_path),
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


def alone(*folders: Path | None) -> dict[str, str]:
    """Returns an environment without a launcher."""
    environment = launch_environment(*folders)
    return {name: value for name, value in environment.items() if name != "WORLD_SIZE"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_shell(command: str, folder: Path) -> subprocess.CompletedProcess:
    """Runs a command in a folder, with the programs of this environment on the path."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "WANDB_MODE": "offline"}
    return subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


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
