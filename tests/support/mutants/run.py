"""Plants each fault of mutants.yaml in a copy of a checkout and says whether the tests find it.

    python tests/support/mutants/run.py [CHECKOUT] [--rooms core,losses] [--jobs 2]

A fault is looked for with the tests of its room, and then, if they pass, with the end-to-end tests
that train. Run the tests of a clean checkout first: they have to pass.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import yaml

HERE = Path(__file__).resolve().parent
WHOLE_RUNS = tuple(
    f"tests/end_to_end/test_{name}.py" for name in ("training", "correction", "staleness")
)
Fault = Mapping[str, str]


def faults(rooms: list[str] | None) -> Iterator[tuple[str, Fault]]:
    """Yields the room and the words of each fault."""
    for room, listed in yaml.safe_load((HERE / "mutants.yaml").read_text()).items():
        if rooms is None or room in rooms:
            yield from ((room, fault) for fault in listed)


def plant(package: Path, fault: Fault) -> None:
    """Changes the one file of a package that has the old text.

    Raises:
      ValueError: the text does not stand exactly once.
    """
    files = [path for path in package.rglob("*.py") if fault["old"] in path.read_text()]
    if len(files) != 1 or files[0].read_text().count(fault["old"]) != 1:
        raise ValueError(f"{fault['old']!r} does not stand exactly once: {files}")
    files[0].write_text(files[0].read_text().replace(fault["old"], fault["new"]))


def passes(copy: Path, tests: list[str]) -> bool:
    """Returns whether the tests of a copy pass; they stop at the first failure."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        command, cwd=copy, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    if run.returncode not in (0, 1, 2):
        raise RuntimeError(f"{' '.join(command)} in {copy} ended with {run.returncode}")
    return run.returncode == 0


def found_by(checkout: Path, room: str, fault: Fault) -> str:
    """Plants a fault in a copy; returns who finds it: `room`, `whole runs` or `nothing`."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "copy")
        ignored = shutil.ignore_patterns(".git", ".venv*", "__pycache__", "outputs")
        shutil.copytree(checkout, copy, ignore=ignored)
        if "old" in fault:
            plant(copy / "flowgrpo_rc", fault)
        if not passes(copy, [f"tests/{room}"]):
            return "room"
        return "nothing" if passes(copy, list(WHOLE_RUNS)) else "whole runs"


def main() -> int:
    """Runs the command line; returns 1 if a fault is not found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkout", nargs="?", default=HERE.parents[2], type=Path)
    parser.add_argument("--rooms", type=lambda text: text.split(","), help="all")
    parser.add_argument("--jobs", type=int, default=2, help="faults at once (2)")
    arguments = parser.parse_args()
    planted = list(faults(arguments.rooms))

    def look(item: tuple[str, Fault]) -> str:
        room, fault = item
        finder = found_by(arguments.checkout.resolve(), room, fault)
        print(f"{room}: {fault['why']}: found by {finder}", flush=True)
        return finder

    with ThreadPoolExecutor(arguments.jobs) as pool:
        finders = list(pool.map(look, planted))
    print(f"{len(finders) - finders.count('nothing')} of {len(finders)} faults found")
    return int("nothing" in finders)


if __name__ == "__main__":
    sys.exit(main())
