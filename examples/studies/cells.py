"""The raw results of a study: one small JSON file for each cell.

    results/STUDY/CELL.json    {"package": version, and what the study measured}

A study that was stopped goes on with the cells that have no file yet. Numbers are rounded to six
significant digits, which is far below their statistical error.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
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


class Named(Protocol):
    """A run of a study.

    Attributes:
      name: of its file.
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
    return {
        path.stem: json.loads(path.read_text()) for path in sorted((folder / study).glob("*.json"))
    }


def save(study: str, name: str, cell: Cell, folder: Path = RESULTS) -> None:
    """Writes a cell whole: an interrupted write leaves no file.

    Args:
      study: name of the study.
      name: name of the cell.
      cell: its results.
      folder: the folder of all studies.
    """
    path = folder / study / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    stored = rounded({"package": flowgrpo_rc.__version__, **cell})
    draft = path.with_suffix(".tmp")
    text = json.dumps(stored, indent=1, allow_nan=False)
    # A list of numbers stands on one line.
    text = re.sub(r"\[([^][{}\"]*)\]", lambda found: f"[{' '.join(found[1].split())}]", text)
    draft.write_text(text + "\n")
    os.replace(draft, path)


def make_missing(
    study: str,
    runs: Sequence[AnyRun],
    make: Callable[[AnyRun], None],
    *,
    workers: int = 1,
    folder: Path = RESULTS,
) -> None:
    """Makes the runs of a study that have no file, in their order, and prints their names.

    Args:
      study: name of the study.
      runs: its runs.
      make: makes one run and its file.
      workers: runs at a time.
      folder: the folder of all studies.

    Raises:
      Exception: what the first run that failed raised, after all the others have been made.
    """

    def work(run: AnyRun) -> None:
        if not (folder / study / f"{run.name}.json").is_file():
            try:
                make(run)
            except Exception:
                print(f"{run.name} failed; why is said after the last run", flush=True)
                raise
            print(run.name, flush=True)

    executor = ThreadPoolExecutor(workers)
    futures = [executor.submit(work, run) for run in runs]
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
