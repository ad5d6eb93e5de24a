"""Makes what all worker processes of a session share."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


def shared_folder(factory: pytest.TempPathFactory) -> Path:
    """Returns the folder that all workers of pytest-xdist see."""
    base = factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


def make_once(path: Path, make: Callable[[Path], object]) -> Path:
    """Calls `make` with the path, unless a worker has; the others wait for it. Returns the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    done = path.with_name(f"{path.name}.done")
    with path.with_name(f"{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            if path.is_dir():
                shutil.rmtree(path)  # of a worker that failed
            make(path)
            done.touch()
    return path
