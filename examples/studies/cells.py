"""The raw results of a study: a file of JSON lines, one for each cell.

    results/STUDY.jsonl    {"name": of the cell, "package": version, and what the study measured}

A study that was stopped goes on with the cells that have no line yet. One process writes a study at
a time. Numbers are rounded to six significant digits, which is far below their statistical error.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from threading import Lock
from typing import Any, Protocol, TypeVar

import flowgrpo_rc

RESULTS = Path(__file__).parent / "results"
DIGITS = 6
# Overrides of the bundled job: every sample is trained on; it starts from noise of its own; the
# rollout evaluates the LoRA's own layers; all of them.
EVERY_SAMPLE = ("actor.train_n=null", "actor.ppo_micro_batch_size_per_gpu=12")
OWN_NOISE = ("rollout.algo.shared_prefix=false",)
SEPARATE_LORA = ("rollout.merge_lora=false",)
PLAIN_JOB = (*EVERY_SAMPLE, *OWN_NOISE, *SEPARATE_LORA)

Cell = dict[str, Any]
_one_at_a_time = Lock()  # of the threads that add a cell


class Named(Protocol):
    """A run of a study.

    Attributes:
      name: of its cell.
    """

    @property
    def name(self) -> str: ...


AnyRun = TypeVar("AnyRun", bound=Named)


def load(study: str, folder: Path = RESULTS) -> dict[str, Cell]:
    """Reads every cell of a study.

    Args:
      study: name of the study.
      folder: the folder of all studies.

    Returns:
      Name of the cell -> its results.
    """
    path = folder / f"{study}.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    return {row.pop("name"): row for row in map(json.loads, lines)}


def save(study: str, name: str, cell: Cell, folder: Path = RESULTS) -> None:
    """Adds a cell to a study's file, or replaces it; an interrupted write changes nothing.

    Args:
      study: name of the study.
      name: name of the cell.
      cell: its results.
      folder: the folder of all studies.
    """
    stored = rounded({"package": flowgrpo_rc.__version__, **cell})
    path = folder / f"{study}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".tmp")
    with _one_at_a_time:
        cells = load(study, folder) | {name: stored}
        rows = ({"name": name, **cells[name]} for name in sorted(cells))
        draft.write_text("".join(f"{json.dumps(row, allow_nan=False)}\n" for row in rows))
        os.replace(draft, path)


def make_missing(
    study: str,
    runs: Sequence[AnyRun],
    make: Callable[[AnyRun], None],
    *,
    workers: int = 1,
    folder: Path = RESULTS,
) -> None:
    """Makes the runs of a study that have no cell, in their order, and prints their names.

    Args:
      study: name of the study.
      runs: its runs.
      make: makes one run and saves its cell.
      workers: runs at a time.
      folder: the folder of all studies.

    Raises:
      Exception: what the first run that failed raised, after all the others have been made.
    """

    def work(run: AnyRun) -> None:
        try:
            make(run)
        except Exception:
            print(f"{run.name} failed; why is said after the last run", flush=True)
            raise
        print(run.name, flush=True)

    done = load(study, folder)
    executor = ThreadPoolExecutor(workers)
    futures = [executor.submit(work, run) for run in runs if run.name not in done]
    try:
        wait(futures)
    finally:
        executor.shutdown(cancel_futures=True)
    for future in futures:
        future.result()


def rounded(value: Any) -> Any:
    """Rounds every float of a tree of dicts and lists to `DIGITS` significant digits."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return value
