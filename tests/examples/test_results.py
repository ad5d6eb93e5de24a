"""The results of the studies."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from cells import load, make_missing, save
from learning import Run

# Number of cells and hash, as they were when every cell had a file of its own.
MEASURED = {
    "algorithms": (12, "dba0bbe1bcfc8f87"),
    "gradient": (110, "44b82aa70ce44b42"),
    "ladder": (230, "4d505f1e75e66288"),
    "learning": (51, "44f002ef89addb80"),
    "time_to_reward": (70, "94dc577cb3d0cb43"),
    "whole_job": (14, "fb34645d8b93c3df"),
}


@pytest.mark.parametrize("study", MEASURED)
def test_no_result_is_lost_or_changed(study: str) -> None:
    cells = load(study)
    digest = hashlib.sha256(json.dumps(cells, sort_keys=True).encode()).hexdigest()
    assert (len(cells), digest[:16]) == MEASURED[study]


def test_a_study_makes_the_cells_that_it_lacks(tmp_path: Path) -> None:
    runs = [Run("bf16", "bypass", seed=seed) for seed in (3, 1, 2)]
    save("study", runs[1].name, {"value": 1 / 3}, tmp_path)
    made = []

    def make(run: Run) -> None:
        made.append(run.name)
        save("study", run.name, {"value": run.seed}, tmp_path)

    make_missing("study", runs, make, folder=tmp_path)
    assert made == [runs[0].name, runs[2].name]
    found = load("study", tmp_path)
    assert [(name, cell["value"]) for name, cell in found.items()] == [
        (runs[1].name, 0.333333),
        (runs[2].name, 2),
        (runs[0].name, 3),
    ]
