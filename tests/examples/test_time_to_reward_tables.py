"""Numbers of docs/performance.md follow from rewards by iteration and seconds of one."""

from __future__ import annotations

import math

import pytest
import time_to_reward_tables as tables


def run(arm: str, *rewards: float, seed: int = 1) -> dict:
    steps = [10 * i for i in range(len(rewards))]
    return {"arm": arm, "seed": seed, "steps": steps, "reward": [*rewards], "iterations": steps[-1]}


def clock(arm: str, seconds: float) -> dict:
    return {"arm": arm, "iteration_cpu_seconds": seconds, "iteration_wall_seconds": 2 * seconds}


CELLS = {
    "a1": run("ours", 0.50, 0.55, 0.65),
    "a2": run("ours", 0.50, 0.60, 0.60, seed=2),
    "a3": run("ours", 0.50, 0.50, 0.50, seed=3),
    "b1": run("theirs", 0.50, 0.50, 0.55),
    "clock_ours": clock("ours", 3.0),
    "clock_theirs": clock("theirs", 5.0),
}


@pytest.mark.parametrize(
    ("rewards", "iteration"), [((0.7, 0.5), 0), ((0.5, 0.7), 5), ((0.5, 0.5, 0.6), 20)]
)
def test_a_reward_is_reached_on_the_line_between_two_snapshots(
    rewards: tuple[float, ...], iteration: float
) -> None:
    assert tables.reached(run("one", *rewards), "0.60") == pytest.approx(iteration)


def test_a_reward_may_never_be_reached() -> None:
    assert tables.reached(run("one", 0.5, 0.59), "0.60") == math.inf


def test_seconds_are_iterations_of_the_median_run_times_those_of_one() -> None:
    # Reached in iterations 15, 10 and never.
    assert tables.iterations_to(CELLS, "ours", "0.60") == pytest.approx(15)
    assert tables.seconds_to(CELLS, "ours", "0.60", "cpu") == (pytest.approx(45), 60)
    assert tables.seconds_to(CELLS, "ours", "0.60", "wall") == (pytest.approx(90), 120)


def test_a_reference_that_never_gets_there_gives_a_bound() -> None:
    assert tables.ratio_to(CELLS, "ours", "theirs", "0.60", "cpu") == "below 0.45"  # 45 of 100 s
    assert tables.ratio_to(CELLS, "theirs", "ours", "0.60", "cpu") == tables.NEVER
    assert tables.ratio_to(CELLS, "theirs", "ours", "0.55", "cpu") == "3.33"  # 100 s of 30


def test_what_was_not_measured_is_missing() -> None:
    assert tables.ratio_to(CELLS, "ours", "nobody", "0.60", "cpu") == tables.MISSING
    assert tables.ratio_to(CELLS, "nobody", "ours", "0.60", "cpu") == tables.MISSING


def test_rewards_are_compared_after_as_many_iterations() -> None:
    """An arm with cheap iterations may go on for longer."""
    cells = {
        "a1": run("shipped", *[0.5] * 5, 0.6, 0.9),
        "a2": run("shipped", *[0.5] * 5, 0.7, 0.9, seed=2),
        "b1": run("base", *[0.5] * 5, 0.62),
    }
    assert tables.rewards_after(cells, "shipped") == [0.6, 0.7]
    assert tables.mean_reward(cells, "shipped") == "0.650"
    assert tables.level(cells, "base", "shipped")
    assert tables.longer(cells) == "`shipped` 60"
    assert tables.longer({}) == tables.mean_reward({}, "base") == tables.MISSING


def test_an_arm_of_two_processes_has_the_iterations_of_the_one_with_one() -> None:
    """Its seconds alone are measured."""
    cells = {
        "a1": run("shipped", *[0.50] * 3, 0.54, 0.60, 0.60),
        "b1": run(tables.REFERENCE, *[0.50] * 5, 0.60),
        "clock_shipped": clock("shipped", 2.0),
        "clock_shipped_2_processes": clock("shipped_2_processes", 1.0),
        f"clock_{tables.REFERENCE}": clock(tables.REFERENCE, 4.0),
    }
    assert tables.iterations_to(cells, "shipped_2_processes", "0.60") == pytest.approx(40)
    lines = tables.both_cores(cells).splitlines()
    assert "| `shipped` | 0.50 | 0.50 | 0.40 | not reached |" in lines
    assert "| `shipped_2_processes` | 0.25 | 0.25 | 0.20 | not reached |" in lines
    assert "2_processes" not in tables.ratios(cells)
