"""The tables and numbers of docs/performance.md.

Seconds are ratios to the reference. The ratio of two arms' iterations is the median of those of the
rounds in which both ran. The time to a reward is that, times the median over the seeds of the
iterations to the reward.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from typing import Any

from cells import Cell
from tables import markdown
from time_to_reward_arms import GOES, LEVERS, REFERENCE, REPEATS, TARGET
from time_to_reward_arms import STUDY as STUDY

MISSING = "-"
NEVER = "not reached"
CLOCKS = {"cpu": "CPU", "wall": "clock"}

Cells = Mapping[str, Cell]


def runs_of(cells: Cells, arm: str) -> list[Cell]:
    """Returns the runs of an arm, or those of the arm that it repeats."""
    return [cell for cell in runs_in(cells) if cell["arm"] == REPEATS.get(arm, arm)]


def runs_in(cells: Cells) -> list[Cell]:
    """Returns all runs."""
    return [cell for cell in cells.values() if "seed" in cell]


def clocked(cells: Cells, go: str, arm: str) -> dict[str, Any]:
    """Returns what a go has measured of an arm, a value for each round; empty if it has not."""
    return dict(cells.get(go, {}).get("arms", {}).get(arm, {}))


def iteration_ratio(cells: Cells, go: str, arm: str, base: str, clock: str) -> float | None:
    """Returns the seconds of an arm's iteration over those of another; None if one is missing.

    Args:
      cells: the results.
      go: in which both ran.
      arm: the arm.
      base: the other.
      clock: `cpu` or `wall`.
    """
    name = f"iteration_{clock}_seconds"
    pairs = [clocked(cells, go, one).get(name) for one in (arm, base)]
    if None in pairs:
        return None
    return statistics.median(own / other for own, other in zip(*pairs, strict=True))


def reached(run: Cell, target: float = TARGET) -> float:
    """Returns the iteration in which a run first has a reward, infinite if it never does.

    The rewards between two snapshots are taken to lie on a line.

    Args:
      run: a run.
      target: the reward.
    """
    steps, rewards = run["steps"], run["reward"]
    if rewards[0] >= target:
        return steps[0]
    for i in range(1, len(rewards)):
        if rewards[i] >= target:
            share = (target - rewards[i - 1]) / (rewards[i] - rewards[i - 1])
            return steps[i - 1] + share * (steps[i] - steps[i - 1])
    return math.inf


def iterations_to(cells: Cells, arm: str) -> float | None:
    """Returns the median over an arm's runs of the iteration that reaches the target."""
    runs = runs_of(cells, arm)
    return statistics.median(map(reached, runs)) if runs else None


def told(value: float | None, digits: int = 2) -> str:
    """Returns a number as a cell of a table; None was not measured, infinity not reached."""
    if value is None:
        return MISSING
    return NEVER if math.isinf(value) else f"{value:.{digits}f}"


def time_to(cells: Cells, arm: str, clock: str) -> float | None:
    """Returns the time to the target over that of the reference."""
    ratio = iteration_ratio(cells, "jobs", arm, REFERENCE, clock)
    own, reference = iterations_to(cells, arm), iterations_to(cells, REFERENCE)
    if ratio is None or own is None or reference is None:
        return None
    return ratio * own / reference


def seeds(cells: Cells, arm: str) -> str:
    """Returns the median of the iterations to the target, their range, and how many got there."""
    found = sorted(map(reached, runs_of(cells, arm)))
    there = [value for value in found if not math.isinf(value)]
    if not there:
        return NEVER if found else MISSING
    told_range = f"{there[0]:.0f} to {there[-1]:.0f}"
    return f"{told(statistics.median(found), 0)} ({told_range}; {len(there)} of {len(found)})"


def jobs(cells: Cells) -> str:
    """Makes the table of the jobs: the cost of an iteration, and the time to the target."""
    rows = []
    for arm in GOES["jobs"]:
        costs = [iteration_ratio(cells, "jobs", arm, REFERENCE, clock) for clock in CLOCKS]
        memory = clocked(cells, "jobs", arm).get("peak_memory_gib")
        times = [time_to(cells, arm, clock) for clock in CLOCKS]
        rows.append(
            [
                f"`{arm}`",
                *map(told, costs),
                told(memory and statistics.median(memory)),
                seeds(cells, arm),
                *map(told, times),
            ]
        )
    columns = ["iteration, CPU", "iteration, clock", "memory, GiB", f"iterations to {TARGET:.2f}"]
    return markdown(["job", *columns, *(f"{c} to {TARGET:.2f}" for c in CLOCKS.values())], rows)


def levers(cells: Cells) -> str:
    """Makes the table of the settings: what each saves of the iteration without it."""
    ratios = {key: iteration_ratio(cells, "levers", "bundled", key, "cpu") for key in LEVERS}
    rows = [
        [
            f"`{key}`",
            MISSING if (one := ratios[key]) is None else f"{100 * (1 - one):.0f}%",
            LEVERS[key].leaves_away,
            LEVERS[key].changes,
        ]
        for key in sorted(ratios, key=lambda key: ratios[key] or 0.0)
    ]
    return markdown(["setting", "saves, CPU", "what it leaves away", "what changes"], rows)


def rewards_after(cells: Cells, arm: str) -> list[float]:
    """Returns the last reward of each run of an arm."""
    return [run["reward"][-1] for run in runs_of(cells, arm)]


def mean_reward(cells: Cells, arm: str) -> str:
    """Returns the mean of the last rewards, with its standard error."""
    found = rewards_after(cells, arm)
    if len(found) < 2:
        return MISSING
    error = statistics.stdev(found) / math.sqrt(len(found))
    return f"{statistics.mean(found):.3f} ± {error:.3f}"


def teaches_less_for_a_third(cells: Cells) -> bool:
    """Returns whether our iterations end with less reward, and cost a third of the reference's."""
    ours, theirs = (statistics.mean(rewards_after(cells, arm)) for arm in ("bundled", REFERENCE))
    cost = iteration_ratio(cells, "jobs", "bundled", REFERENCE, "cpu")
    return ours < theirs and cost is not None and abs(cost - 1 / 3) < 0.03


def of_two_processes(cells: Cells, clock: str) -> str:
    """Returns the ratio of iterations of two processes, ours over the reference."""
    arms = ("bundled_2_processes", "flow_grpo_fast_2_processes")
    return told(iteration_ratio(cells, "jobs", *arms, clock))


def without_bf16(cells: Cells) -> str:
    """Returns the ratio of iterations on a CPU without bf16 units, ours over the reference."""
    return told(iteration_ratio(cells, "without_bf16", "bundled", REFERENCE, "cpu"))


GO_TABLES: Mapping[str, Callable[[Cells], str]] = {
    "jobs": jobs,
    "levers": levers,
    "without_bf16": without_bf16,
}
ENTRIES: Mapping[str, Callable[[Cells], str]] = {
    "time_to_reward": jobs,
    "saved_by_levers": levers,
    "time_to_reward_runs": lambda cells: str(len(runs_in(cells))),
    "iteration_of_bundled": lambda cells: told(
        iteration_ratio(cells, "jobs", "bundled", REFERENCE, "cpu")
    ),
    "cpu_of_two_processes": lambda cells: of_two_processes(cells, "cpu"),
    "clock_of_two_processes": lambda cells: of_two_processes(cells, "wall"),
    "iteration_without_bf16": without_bf16,
    "cpu_to_60_of_bundled": lambda cells: told(time_to(cells, "bundled", "cpu")),
    "reward_of_bundled": lambda cells: mean_reward(cells, "bundled"),
    "reward_of_fast_script": lambda cells: mean_reward(cells, REFERENCE),
}
CLAIMS: Mapping[str, Callable[[Cells], bool]] = {
    "teaches_less_for_a_third": teaches_less_for_a_third
}
