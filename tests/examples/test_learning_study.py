"""The learning study: its cells are valid runs, and its tables take partial data."""

from __future__ import annotations

import json
from pathlib import Path

import learning
import learning_tables
import pytest
from cells import Cell, load

from flowgrpo_rc.config.compose import compose_config, to_config

CELLS = (*learning.MATTER, *learning.FURTHER)
MISMATCH_IN_CLIP = {("int4", "calibrated"), ("int4", "guard")}  # it is ten times that of bf16


@pytest.mark.parametrize("cell", CELLS, ids="_".join)
def test_every_cell_is_a_valid_run(cell: tuple[str, str]) -> None:
    run = learning.Run(*cell, seed=3)
    config = to_config(compose_config(learning.overrides(run, learning.WHOLE)))
    assert config.rollout.val_kwargs.n == 256
    clip = config.actor.diffusion_loss.clip_ratio
    assert clip == (1e-2 if cell in MISMATCH_IN_CLIP else learning.CLIPS.get(run.arm, 1e-3))


def test_an_interruption_leaves_balanced_data():
    runs = learning.plan(CELLS, 5)
    assert len({run.name for run in runs}) == len(runs) == 5 * len(CELLS)
    matter = runs[: 5 * len(learning.MATTER)]
    further = runs[5 * len(learning.MATTER) :]
    assert {run[:2] for run in matter} == set(learning.MATTER)
    for group in (matter, further):
        assert [run.seed for run in group] == sorted(run.seed for run in group)
    assert len(set(CELLS)) == len(CELLS)


def run(rollout: str, arm: str, seed: int, after: float) -> Cell:
    curves = {"reward": [0.5, 0.6], "seconds": [1.0, 2.0], "clip_fraction": [0.25, 0.75]}
    own = {"rollout": rollout, "arm": arm, "seed": seed, "before": 0.5, "after": after}
    return own | {"exact_before": 0.1, "exact_after": 0.2, "cpu_seconds": 9.0, "curves": curves}


def test_intervals_are_student_s():
    found = learning_tables.estimate([1.0, 2.0, 3.0, 4.0, 5.0])
    assert found.mean == 3.0
    assert found.half == pytest.approx(1.9632, abs=1e-3)  # 2.7764 * sqrt(2.5 / 5)


def test_differences_pair_the_seeds_and_tables_take_partial_data():
    reference = [run("fp32", "bypass", seed, 0.6 + 0.1 * seed) for seed in (1, 2, 3)]
    others = [run("int4", "recipe", seed, 0.4 + 0.1 * seed) for seed in (2, 1)]
    cells = {
        str(number): cell
        for number, cell in enumerate([*others, *reference, run("stale", "is", 1, 0.61)])
    }
    rows = [line.split(" | ") for line in learning_tables.rewards(cells).splitlines()[2:]]
    assert [row[0] for row in rows] == ["| fp32", "| int4", "| stale"]
    assert [row[2] for row in rows] == ["3", "2", "1"]
    assert [row[4] for row in rows] == ["-", "-0.200 ± 0.000", "-0.090"]
    assert [row[6] for row in rows] == ["0 of 3", "0 of 2", "0 of 1"]
    assert [row[7] for row in rows] == ["50.0%"] * 3
    assert learning_tables.cpu_seconds(cells) == "9 to 9"
    assert learning_tables.rewards({}).count("\n") == 1


def test_a_collapse_is_an_end_below_the_start():
    runs = {
        seed: run("int4", "recipe", seed, reward) for seed, reward in enumerate([0.49, 0.5, 0.51])
    }
    assert learning_tables.collapsed(runs) == 1


def test_files_are_small_and_complete(tmp_path: Path) -> None:
    for name, cell in load(learning.STUDY).items():
        assert name == learning.Run(cell["rollout"], cell["arm"], cell["seed"]).name
        assert (cell["rollout"], cell["arm"]) in CELLS
        assert {len(curve) for curve in cell["curves"].values()} == {learning.ITERATIONS}
        assert len(json.dumps(cell)) < 6000
