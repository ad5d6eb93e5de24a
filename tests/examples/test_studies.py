"""The studies: no result is lost, every arm is a valid run, and the tables follow their rules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import algorithms
import ladder
import ladder_tables
import learning
import learning_tables
import pytest
import time_to_reward
import time_to_reward_arms
import time_to_reward_tables
import whole_job
import whole_job_tables
from cells import Cell, load, make_missing, save
from learning import Run

from flowgrpo_rc.config.check_settings import check_settings
from flowgrpo_rc.config.compose import compose_config, to_config


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


# --- The arms


def arms() -> dict[str, list[str]]:
    """Returns the overrides of every arm and rollout of every study, each of them once."""
    plan = time_to_reward.Plan(150, time_to_reward.EVERY, 256, (), {}, Path("results"))
    found = {
        f"time_to_reward-{arm}": time_to_reward.Run(arm, 3).overrides(plan, Path("run"))
        for arm in time_to_reward_arms.ARMS
        if arm not in time_to_reward_arms.RETIRED
    }
    for arm in algorithms.ARMS:
        found[f"algorithms-{arm}"] = algorithms.overrides(Run("fp32", arm, seed=1))
    for rollout, of_rollout in whole_job.ARMS.items():
        for arm in of_rollout:
            found[f"whole_job-{rollout}-{arm}"] = whole_job.overrides(Run(rollout, arm, seed=1))
    for rollout, arm in each_once((*learning.MATTER, *learning.FURTHER)):
        own = learning.overrides(Run(rollout, arm, seed=1), learning.WHOLE)
        found[f"learning-{rollout}-{arm}"] = own
    for rollout, arm in each_once(ladder.CELLS):
        found[f"ladder-{rollout}-{arm}"] = ladder.overrides(Run(rollout, arm, seed=1))
    return found


def each_once(cells: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Returns few cells, among which are every rollout and every arm."""
    of_rollouts = {rollout: (rollout, arm) for rollout, arm in cells}
    of_arms = {arm: (rollout, arm) for rollout, arm in cells}
    return sorted({*of_rollouts.values(), *of_arms.values()})


@pytest.mark.parametrize("words", [pytest.param(w, id=name) for name, w in arms().items()])
def test_every_arm_is_a_valid_run(words: list[str]) -> None:
    name = "tiny_ocr"
    if words[0] == "--config-name":
        name, words = words[1], words[2:]
    check_settings(to_config(compose_config(words, config_name=name)))


# --- The tables


def run(rollout: str, arm: str, seed: int, after: float) -> Cell:
    curves = {"reward": [0.5, 0.6], "mismatch": [1e-4, 3e-4]}
    own = {"rollout": rollout, "arm": arm, "seed": seed, "before": 0.5, "after": after}
    return own | {"cpu_seconds": 9.0, "curves": curves}


def named(*runs: Cell) -> dict[str, Cell]:
    return {f"{one['rollout']}_{one['arm']}_seed{one['seed']}": one for one in runs}


def test_intervals_are_student_s():
    found = learning_tables.estimate([1.0, 2.0, 3.0, 4.0, 5.0])
    assert found.mean == 3.0
    assert found.half == pytest.approx(1.9632, abs=1e-3)  # 2.7764 * sqrt(2.5 / 5)


def test_a_collapse_is_an_end_below_the_start():
    runs = {seed: run("int4", "recipe", seed, end) for seed, end in enumerate([0.49, 0.5, 0.51])}
    assert learning_tables.collapsed(runs) == 1


def test_differences_pair_the_seeds():
    reference = {seed: run("fp32", "bypass", seed, 0.6 + 0.1 * seed) for seed in (1, 2, 3)}
    others = {seed: run("int4", "recipe", seed, 0.4 + 0.1 * seed) for seed in (2, 1)}
    found = learning_tables.difference(others, reference)
    assert (found.mean, found.count) == (pytest.approx(-0.2), 2)


def test_cells_share_one_spread_and_collapsed_ones_are_left_out():
    cells = named(
        *(run("fp32", "bypass", seed, 0.6 + 0.1 * seed) for seed in (1, 2)),
        run("bf16", "centered", 1, 0.71),
        run("bf16", "centered", 2, 0.79),  # +0.01 and -0.01
        run("bf16", "recipe", 1, 0.65),
        run("bf16", "recipe", 2, 0.75),  # -0.05 twice
        run("skip", "recipe", 1, 0.1),  # collapsed
        run("skip", "recipe", 2, 0.4),
    )
    spread = math.sqrt(2 * 0.01**2 / 2)  # over two cells of one degree of freedom each
    assert ladder_tables.spread(cells) == pytest.approx(spread)
    level, beaten = (ladder_tables.against(cells, "bf16", arm) for arm in ("centered", "recipe"))
    assert level.mean == pytest.approx(0)
    assert level.error == pytest.approx(spread / math.sqrt(2))
    assert (level.beaten, beaten.beaten) == (False, True)
    assert [ladder_tables.good(cells, arm) for arm in ("centered", "recipe")] == [1, 0]


@pytest.mark.parametrize(("behind", "holds"), [(0.019, True), (0.021, False)])
def test_an_arm_is_beaten_beyond_two_standard_errors(behind: float, holds: bool) -> None:
    # Differences of -behind, with a standard deviation of 0.01 sqrt(3) and so an error of 0.01.
    spread = 0.01 * math.sqrt(3)
    guard = [("guard", 1, 0.7), ("guard", 2, 0.7 + spread), ("guard", 3, 0.7 - spread)]
    even = [("centered", seed, 0.7 + behind) for seed in (1, 2, 3)]
    cells = named(*(run("int4", *one) for one in (*guard, *even)))
    assert whole_job_tables.CLAIMS["whole_job_guard_holds"](cells) is holds


def curve(arm: str, *rewards: float, seed: int = 1) -> Cell:
    steps = [10 * i for i in range(len(rewards))]
    return {"arm": arm, "seed": seed, "steps": steps, "reward": [*rewards], "iterations": steps[-1]}


def clock(arm: str, seconds: float) -> Cell:
    return {"arm": arm, "iteration_cpu_seconds": seconds, "iteration_wall_seconds": 2 * seconds}


@pytest.mark.parametrize(
    ("rewards", "iteration"),
    [((0.7, 0.5), 0), ((0.5, 0.7), 5), ((0.5, 0.5, 0.6), 20), ((0.5, 0.59), math.inf)],
)
def test_a_reward_is_reached_on_the_line_between_two_snapshots(
    rewards: tuple[float, ...], iteration: float
) -> None:
    found = time_to_reward_tables.reached(curve("one", *rewards), "0.60")
    assert found == pytest.approx(iteration)


def test_seconds_are_iterations_of_the_median_run_times_those_of_one() -> None:
    tables = time_to_reward_tables
    cells = {
        "a1": curve("ours", 0.50, 0.55, 0.65),
        "a2": curve("ours", 0.50, 0.60, 0.60, seed=2),
        "a3": curve("ours", 0.50, 0.50, 0.50, seed=3),
        "b1": curve("theirs", 0.50, 0.50, 0.55),
        "clock_ours": clock("ours", 3.0),
        "clock_theirs": clock("theirs", 5.0),
    }
    # Reached in iterations 15, 10 and never.
    assert tables.seconds_to(cells, "ours", "0.60", "cpu") == (pytest.approx(45), 60)
    assert tables.seconds_to(cells, "ours", "0.60", "wall") == (pytest.approx(90), 120)
    assert tables.ratio_to(cells, "ours", "theirs", "0.60", "cpu") == "below 0.45"  # 45 of 100 s
    assert tables.ratio_to(cells, "theirs", "ours", "0.60", "cpu") == tables.NEVER
    assert tables.ratio_to(cells, "theirs", "ours", "0.55", "cpu") == "3.33"  # 100 s of 30
    assert tables.ratio_to(cells, "ours", "nobody", "0.60", "cpu") == tables.MISSING
