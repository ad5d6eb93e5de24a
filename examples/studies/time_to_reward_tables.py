"""The tables and numbers of docs/performance.md.

Seconds are ratios: the median over the seeds of an arm, divided by that of the reference.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence

from cells import Cell
from tables import markdown
from time_to_reward_arms import ARMS, PEER_ARMS, REFERENCE, TARGETS, settings
from time_to_reward_arms import STUDY as STUDY

MISSING = "-"
NEVER = "not reached"

Quantity = Callable[[Cell], float]


def runs_of(cells: Mapping[str, Cell], arm: str) -> list[Cell]:
    """Returns the runs of an arm."""
    return [cell for cell in cells.values() if cell["arm"] == arm]


def seconds_to(clock: str, target: str) -> Quantity:
    """Returns what reads the seconds to a reward from a run: infinite where it was not reached."""

    def read(run: Cell) -> float:
        seconds = run[f"{clock}_seconds_to"][target]
        return math.inf if seconds is None else seconds

    return read


def ratio(own: Sequence[Cell], reference: Sequence[Cell], quantity: Quantity) -> str:
    """Divides the median over the runs of an arm by that over the runs of the reference.

    Args:
      own: the runs of the arm.
      reference: the runs of the reference.
      quantity: reads a number from a run.

    Returns:
      The text of a table's cell.
    """
    if not own:
        return MISSING
    found = statistics.median(map(quantity, own))
    if math.isinf(found):
        return NEVER
    if not reference:
        return MISSING
    base = statistics.median(map(quantity, reference))
    return MISSING if math.isinf(base) else f"{found / base:.2f}"


def ratios(cells: Mapping[str, Cell]) -> str:
    """Makes the table of seconds, memory and final rewards."""
    columns: dict[str, Quantity] = {
        "iteration, CPU": lambda run: run["iteration_cpu_seconds"],
        **{f"CPU to {target}": seconds_to("cpu", target) for target in TARGETS},
        **{f"clock to {target}": seconds_to("wall", target) for target in TARGETS},
        "memory": lambda run: run["peak_memory_gib"],
    }
    reference = runs_of(cells, REFERENCE)
    rows = []
    for arm in (*ARMS, *PEER_ARMS):
        runs = runs_of(cells, arm)
        found = [ratio(runs, reference, quantity) for quantity in columns.values()]
        rows.append([f"`{arm}`", len(runs), *found, last_reward(runs)])
    return markdown(["arm", "seeds", *columns, "reward at the end"], rows)


def last_reward(runs: Sequence[Cell]) -> str:
    """Returns the median of the last rewards."""
    return f"{statistics.median(run['reward'][-1] for run in runs):.3f}" if runs else MISSING


def ahead(cells: Mapping[str, Cell]) -> str:
    """Makes the table of sampling ahead; ratios are to runs that sample and train by turns."""
    rows = []
    reference = runs_of(cells, "shipped")
    for arm in ("shipped", "ahead_1", "ahead_4"):
        runs = runs_of(cells, arm)
        rewards = sorted(run["reward"][-1] for run in runs)
        clocks = ("iteration_wall_seconds", "iteration_cpu_seconds")
        found = [ratio(runs, reference, lambda run, name=name: run[name]) for name in clocks]
        to_target = [ratio(runs, reference, seconds_to("wall", target)) for target in TARGETS]
        spread = ", ".join(f"{reward:.3f}" for reward in rewards) or MISSING
        rows.append([f"`{arm}`", len(runs), *found, *to_target, spread])
    columns = ["iteration, clock", "iteration, CPU", *(f"clock to {t}" for t in TARGETS)]
    return markdown(["arm", "seeds", *columns, "rewards at the end"], rows)


def arms(_: Mapping[str, Cell]) -> str:
    """Makes the table of what sets the arms apart."""
    rows = [
        [f"`{arm}`", " ".join(f"`{one}`" for one in settings(arm)) or "nothing"]
        for arm in (*ARMS, *PEER_ARMS)
    ]
    return markdown(["arm", "overrides, or script"], rows)


def iterations(cells: Mapping[str, Cell]) -> str:
    """Returns how many iterations a run has."""
    return ", ".join(str(n) for n in sorted({run["iterations"] for run in cells.values()})) or "-"


ENTRIES = {
    "time_to_reward": ratios,
    "time_to_reward_ahead": ahead,
    "time_to_reward_arms": arms,
    "time_to_reward_runs": lambda cells: str(len(cells)),
    "time_to_reward_iterations": iterations,
}
CLAIMS: Mapping[str, Callable[[Mapping[str, Cell]], bool]] = {}
