"""The studies: no result is lost, every arm is a valid run, and the tables follow their rules."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import algorithms
import cached
import diversity
import estimates
import ladder
import ladder_tables
import numpy as np
import pytest
import time_to_reward
import time_to_reward_arms
import time_to_reward_tables
import whole_job
from cells import RESULTS, Cell, load, make_missing, save
from runs import Run
from support.compositions import checked_config
from tables import DOCS

from flowgrpo_rc.config.compose import compose_config


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
    }
    for arm in (*algorithms.ARMS, *algorithms.QUANTIZED):
        found[f"algorithms-{arm}"] = algorithms.overrides(Run("fp32", arm, seed=1))
    for arm in cached.ARMS:
        found[f"cached-{arm}"] = cached.overrides(Run(cached.ROLLOUT, arm, seed=1))
    for rollout, of_rollout in whole_job.ARMS.items():
        for arm in of_rollout:
            found[f"whole_job-{rollout}-{arm}"] = whole_job.overrides(Run(rollout, arm, seed=1))
    for rollout, arm in each_once((*ladder.CELLS, *ladder.FURTHER)):
        found[f"ladder-{rollout}-{arm}"] = ladder.overrides(Run(rollout, arm, seed=1))
    return found


def each_once(cells: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Returns few cells, among which are every rollout and every arm."""
    of_rollouts = {rollout: (rollout, arm) for rollout, arm in cells}
    of_arms = {arm: (rollout, arm) for rollout, arm in cells}
    return sorted({*of_rollouts.values(), *of_arms.values()})


@pytest.mark.slow
@pytest.mark.parametrize("words", [pytest.param(w, id=name) for name, w in arms().items()])
def test_every_arm_is_a_valid_run(words: list[str]) -> None:
    name = "tiny_ocr"
    if words[0] == "--config-name":
        name, words = words[1], words[2:]
    checked_config(compose_config(words, config_name=name))


# --- The tables


def run(rollout: str, arm: str, seed: int, after: float) -> Cell:
    curves = {"reward": [0.5, 0.6], "mismatch": [1e-4, 3e-4]}
    own = {"rollout": rollout, "arm": arm, "seed": seed, "before": 0.5, "after": after}
    return own | {"cpu_seconds": 9.0, "curves": curves}


@pytest.mark.parametrize("count", range(2, 11))
def test_a_mean_at_the_border_of_its_interval_is_a_chance_of_a_twentieth(count: int) -> None:
    half = estimates.T95[count - 2]
    assert estimates.Estimate(-half, half, count).chance == pytest.approx(0.05, abs=1e-4)


def test_what_is_behind_is_corrected_for_the_number_of_comparisons():
    """Takes, of chances 0.001, 0.012, 0.03 and 0.04, the first and the second.

    They are below 0.05 / 4 and 0.05 / 3; the third is not below 0.05 / 2. The second is above 0.
    """
    errors = {"sure": -12.92, "ahead": 5.5, "third": -3.9, "fourth": -3.4}
    half = estimates.T95[2]
    found = {name: estimates.Estimate(t, half, 4) for name, t in errors.items()}
    assert ladder_tables.behind(found) == {"sure"}
    found["ahead"] = estimates.Estimate(-5.5, half, 4)
    assert ladder_tables.behind(found) == {"sure", "ahead"}
    many = found | {f"level {i}": estimates.Estimate(0.1, half, 4) for i in range(60)}
    assert ladder_tables.behind(many) == set()


def test_the_page_has_the_errors_and_collapses_of_the_raw_rows():
    """Every cell of the ladder's table, computed anew from the lines of the file."""
    rows = map(json.loads, (RESULTS / "ladder.jsonl").read_text().splitlines())
    found = {(row["rollout"], row["arm"], row["seed"]): row for row in rows}
    page = (DOCS / "evidence.md").read_text()
    table = page.partition("<!--table:ladder_rewards-->\n")[2].partition("\n|CPU time")[0]
    header, _, *body = [line.strip("|").replace("`", "").split("|") for line in table.splitlines()]
    assert len(body) == 9
    for rollout, _, *cells in body:
        gaps = {}
        for arm, cell in zip(header[2:], cells, strict=True):  # "all four" comes after its four
            runs = [found[rollout, arm, seed] for seed in range(1, 6) if arm != "all four"]
            exact = [found["fp32", "bypass", seed]["after"] for seed in range(1, 6)]
            gaps[arm] = [run["after"] - to for run, to in zip(runs, exact, strict=bool(runs))]
            own = np.array(gaps[arm] or np.mean([gaps[one] for one in header[2:6]], axis=0))
            text = f"{own.mean():+.3f} ± {own.std(ddof=1) / math.sqrt(5):.3f}"
            fell = sum(run["after"] < run["before"] for run in runs)
            assert cell.replace("*", "") == text + (f", {fell} fell" if fell else ""), arm


def test_diversity_is_the_mean_over_all_pairs() -> None:
    pictures = np.zeros((3, 2, 2, 3))
    pictures[2] = 0.5
    assert diversity.distances(pictures, ["AB", "AB", "AC"]) == (
        pytest.approx(1 / 3),  # 0, 0.5 and 0.5
        pytest.approx(1 / 3),  # 0, 1/2 and 1/2
    )


def curve(arm: str, *rewards: float, seed: int = 1) -> Cell:
    steps = [10 * i for i in range(len(rewards))]
    return {"arm": arm, "seed": seed, "steps": steps, "reward": [*rewards], "iterations": steps[-1]}


@pytest.mark.parametrize(
    ("rewards", "iteration"),
    [((0.7, 0.5), 0), ((0.5, 0.7), 5), ((0.5, 0.5, 0.6), 20), ((0.5, 0.59), math.inf)],
)
def test_a_reward_is_reached_on_the_line_between_two_snapshots(
    rewards: tuple[float, ...], iteration: float
) -> None:
    found = time_to_reward_tables.reached(curve("one", *rewards), 0.60)
    assert found == pytest.approx(iteration)


def clock(*cpu: float) -> dict[str, list[float]]:
    wall = [2 * seconds for seconds in cpu]
    return {"iteration_cpu_seconds": [*cpu], "iteration_wall_seconds": wall}


def test_a_time_is_the_ratio_of_the_rounds_times_the_iterations_of_the_median_run():
    tables = time_to_reward_tables
    arms = {"bundled": clock(1.0, 6.0, 3.0), tables.REFERENCE: clock(2.0, 8.0, 10.0)}
    cells = {
        "a1": curve("bundled", 0.50, 0.55, 0.65),
        "a2": curve("bundled", 0.50, 0.60, 0.60, seed=2),
        "a3": curve("bundled", 0.50, 0.50, 0.50, seed=3),
        "b1": curve(tables.REFERENCE, 0.50, 0.50, 0.60),
        "c1": curve("flow_grpo_default", 0.50, 0.50, 0.55),
        "jobs": {"arms": arms | {"flow_grpo_default": clock(9.0, 9.0, 9.0)}},
    }
    # The rounds say 0.5, 0.75 and 0.3; the target is reached in iterations 15, 10 and never.
    assert tables.time_to(cells, "bundled", "cpu") == pytest.approx(0.5 * 15 / 20)
    assert tables.seeds(cells, "bundled") == "15 (10 to 15; 2 of 3)"
    assert tables.time_to(cells, "flow_grpo_default", "cpu") == math.inf
    assert tables.seeds(cells, "flow_grpo_default") == tables.NEVER
    assert tables.time_to(cells, "bundled_2_processes", "cpu") is None  # it was not timed
    assert tables.told(None) == tables.MISSING
