"""A study's raw results: one small JSON file for each cell, so that a study that was stopped goes
on where it was.

    results/STUDY/CELL.json    {"package": version, ...: what the study measured}

Numbers are rounded to six significant digits: far below their statistical error, and a file that
reads well.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import flowgrpo_rc

RESULTS = Path(__file__).parent / "results"
DIGITS = 6

Cell = dict[str, Any]


def load(study: str, folder: Path = RESULTS) -> dict[str, Cell]:
    """Every cell of a study by its name."""
    return {
        path.stem: json.loads(path.read_text()) for path in sorted((folder / study).glob("*.json"))
    }


def save(study: str, name: str, cell: Cell, folder: Path = RESULTS) -> None:
    """Write a cell at once, so that an interrupted write leaves none."""
    path = folder / study / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    text = (
        json.dumps(rounded({"package": flowgrpo_rc.__version__, **cell}), indent=1, allow_nan=False)
        + "\n"
    )
    draft = path.with_suffix(".tmp")
    draft.write_text(text)
    os.replace(draft, path)


def rounded(value: Any) -> Any:
    """`value` with every float at `DIGITS` significant digits."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return value
