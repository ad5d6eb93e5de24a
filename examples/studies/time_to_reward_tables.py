"""The tables and numbers of docs/performance.md.

Seconds are ratios to the reference: the median over the seeds of an arm of the iterations to a
reward, times the seconds of one of its iterations, which were measured for all arms in one go.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from functools import partial

from cells import Cell
from tables import markdown
from time_to_reward_arms import (
    ARMS,
    PEER_ARMS,
    REFERENCE,
    REPEATS,
    TARGETS,
    clock_name,
    settings,
)
from time_to_reward_arms import STUDY as STUDY

COMMON = 50  # iterations that every run has
MISSING = "-"
NEVER = "not reached"
CLOCKS = {"cpu": "CPU", "wall": "clock"}


def runs_of(cells: Mapping[str, Cell], arm: str) -> list[Cell]:
    """Returns the runs of an arm, or those of the arm that it repeats."""
    return [cell for cell in runs_in(cells) if cell["arm"] == REPEATS.get(arm, arm)]


def runs_in(cells: Mapping[str, Cell]) -> list[Cell]:
    """Returns all runs."""
    return [cell for cell in cells.values() if "seed" in cell]


def clock_of(cells: Mapping[str, Cell], arm: str, clock: str) -> float | None:
    """Returns the seconds of an arm's iteration, measured beside all others; None if it was not.

    Args:
      cells: the results.
      arm: the arm.
      clock: `cpu` or `wall`.
    """
    cell = cells.get(clock_name(arm))
    return cell and cell[f"iteration_{clock}_seconds"]


def reached(run: Cell, target: str) -> float:
    """Returns the iteration in which a run first has a reward, infinite if it never does.

    The rewards between two snapshots are taken to lie on a line.

    Args:
      run: a run.
      target: the reward.
    """
    steps, rewards, wanted = run["steps"], run["reward"], float(target)
    if rewards[0] >= wanted:
        return steps[0]
    for i in range(1, len(rewards)):
        if rewards[i] >= wanted:
            share = (wanted - rewards[i - 1]) / (rewards[i] - rewards[i - 1])
            return steps[i - 1] + share * (steps[i] - steps[i - 1])
    return math.inf


def iterations_to(cells: Mapping[str, Cell], arm: str, target: str) -> float | None:
    """Returns the median over an arm's runs of the iteration that reaches a reward."""
    runs = runs_of(cells, arm)
    return statistics.median(reached(run, target) for run in runs) if runs else None


def relative(own: float | None, reference: float | None, most: float | None = None) -> str:
    """Divides a quantity of an arm by that of the reference.

    Args:
      own: of the arm; infinite if it was not reached, None if it was not measured.
      reference: of the reference.
      most: what the reference has spent without reaching it.

    Returns:
      The text of a table's cell. Where only the reference was not reached, it is a bound.
    """
    if own is None or reference is None:
        return MISSING
    if math.isinf(own):
        return NEVER
    if math.isinf(reference):
        return MISSING if most is None else f"below {own / most:.2f}"
    return f"{own / reference:.2f}"


def seconds_to(
    cells: Mapping[str, Cell], arm: str, target: str, clock: str
) -> tuple[float | None, float | None]:
    """Returns the seconds to a reward, and those of a whole run.

    Args:
      cells: the results.
      arm: the arm.
      target: the reward.
      clock: `cpu` or `wall`.
    """
    iteration, iterations = clock_of(cells, arm, clock), iterations_to(cells, arm, target)
    if iteration is None or iterations is None:
        return None, None
    return iteration * iterations, iteration * runs_of(cells, arm)[0]["iterations"]


def ratio_to(cells: Mapping[str, Cell], arm: str, base: str, target: str, clock: str) -> str:
    """Returns the seconds to a reward, divided by those of another arm."""
    own, _ = seconds_to(cells, arm, target, clock)
    reference, whole = seconds_to(cells, base, target, clock)
    return relative(own, reference, whole)


def ratios(cells: Mapping[str, Cell]) -> str:
    """Makes the table of what sets the arms apart, and of their seconds and rewards."""
    rows = []
    for arm in (*ARMS, *PEER_ARMS):
        clocks = [
            relative(clock_of(cells, arm, clock), clock_of(cells, REFERENCE, clock))
            for clock in CLOCKS
        ]
        times = [
            ratio_to(cells, arm, REFERENCE, target, clock) for clock in CLOCKS for target in TARGETS
        ]
        rows.append([f"`{arm}`", changes(arm), mean_reward(cells, arm), *clocks, *times])
    columns = [
        f"reward after {COMMON}",
        *(f"iteration, {CLOCKS[clock]}" for clock in CLOCKS),
        *(f"{CLOCKS[clock]} to {target}" for clock in CLOCKS for target in TARGETS),
    ]
    return markdown(["arm", "what it is", *columns], rows)


def changes(arm: str) -> str:
    """Returns what sets an arm apart from the arm that it builds on."""
    found = settings(arm)
    for base in ("base", "shipped"):
        rest = [one for one in found if one not in settings(base)]
        if arm != base and set(settings(base)) <= set(found):
            return f"`{base}`, {' '.join(f'`{one}`' for one in rest)}"
    return {
        "shipped": "the bundled job with a separate LoRA and a constant rate",
        "merged_lora": "`base`, `rollout.merge_lora=true`",
    }.get(arm) or " ".join(f"`{one}`" for one in found)


def rewards_after(cells: Mapping[str, Cell], arm: str, iterations: int = COMMON) -> list[float]:
    """Returns the reward of each run of an arm after so many iterations, which all runs have."""
    return [run["reward"][run["steps"].index(iterations)] for run in runs_of(cells, arm)]


def mean_reward(cells: Mapping[str, Cell], arm: str) -> str:
    """Returns the mean of these rewards."""
    found = rewards_after(cells, arm)
    return f"{statistics.mean(found):.3f}" if found else MISSING


def level(cells: Mapping[str, Cell], arm: str, other: str) -> bool:
    """Returns whether two arms are no further apart than two seeds of one arm."""
    found = [rewards_after(cells, one) for one in (arm, other)]
    spread = max(max(rewards) - min(rewards) for rewards in found)
    return abs(statistics.mean(found[0]) - statistics.mean(found[1])) <= spread


def faster(cells: Mapping[str, Cell], arm: str, other: str, ratio: float) -> bool:
    """Returns whether an iteration takes an arm at most this share of another's CPU seconds."""
    own, reference = clock_of(cells, arm, "cpu"), clock_of(cells, other, "cpu")
    return own is not None and reference is not None and own <= ratio * reference


def each_reward(cells: Mapping[str, Cell], arm: str) -> str:
    """Lists the reward of each run of an arm after the common number of iterations."""
    return ", ".join(f"{reward:.3f}" for reward in rewards_after(cells, arm)) or MISSING


ENTRIES = {
    "time_to_reward": ratios,
    "time_to_reward_runs": lambda cells: str(len(runs_in(cells))),
}
for _name, _base in (
    ("published_clip", "peer_flow_grpo_fast_tight"),
    ("default_script", "peer_flow_grpo_default"),
):
    ENTRIES[f"time_to_60_of_{_name}"] = partial(
        ratio_to, arm="shipped", base=_base, target="0.60", clock="cpu"
    )
for _target in TARGETS:
    for _clock in CLOCKS:
        ENTRIES[f"{_clock}_to_{_target[-2:]}_of_shipped"] = partial(
            ratio_to, arm="shipped", base=REFERENCE, target=_target, clock=_clock
        )
for _name, _arm in (
    ("shipped", "shipped"),
    ("base", "base"),
    ("fast_script", REFERENCE),
):
    ENTRIES[f"rewards_of_{_name}"] = partial(each_reward, arm=_arm)
CLAIMS: Mapping[str, Callable[[Mapping[str, Cell]], bool]] = {
    "same_recipe_costs_the_same": lambda cells: (
        faster(cells, "flow_grpo_fast", REFERENCE, 1.1)
        and faster(cells, REFERENCE, "flow_grpo_fast", 1.1)
    ),
    "levers_keep_the_reward": lambda cells: all(
        level(cells, "base", arm)
        for arm in ("fp32", "whole_schedule", "merged_lora", "single_steps", "every_sample")
    ),
    "iterations_teach_as_much": lambda cells: all(
        level(cells, arm, REFERENCE) for arm in ("shipped", "base")
    ),
    "bundled_iteration_is_cheaper": lambda cells: faster(cells, "shipped", REFERENCE, 0.7),
    "tight_is_slower": lambda cells: (
        (iterations_to(cells, "peer_flow_grpo_fast_tight", "0.60") or 0)
        > (iterations_to(cells, REFERENCE, "0.60") or math.inf)
    ),
}
