"""The table of docs/evidence.md that compares other algorithms with FlowGRPO."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import ladder
from algorithms import ARMS, REFERENCE, ROLLOUT, STUDY
from cells import Cell, load
from learning_tables import NOTHING, Runs, after, by_cell, difference, estimate
from tables import markdown

__all__ = ["CLAIMS", "ENTRIES", "STUDY"]


def reference() -> Runs:
    """Returns the runs of FlowGRPO, which are the ladder's, by seed."""
    rollout, arm = REFERENCE
    return by_cell(load(ladder.STUDY), (rollout,), (arm,))[REFERENCE]


def rewards(cells: Mapping[str, Cell], flow_grpo: Runs) -> str:
    """Makes the table of rewards after training; arms that have not run are missing in it.

    Args:
      cells: the runs of the study.
      flow_grpo: those of the reference, by seed.
    """
    rows = [["`flow_grpo`", *_of(flow_grpo), NOTHING]]
    for (_, arm), runs in by_cell(cells, (ROLLOUT,), tuple(ARMS)).items():
        gap = difference(runs, flow_grpo)
        rows.append([f"`{arm}`", *_of(runs), NOTHING if gap is None else gap.signed])
    header = ["arm", "seeds", "reward after", "exact match", "against `flow_grpo`, seed by seed"]
    return markdown(header, rows)


def _of(runs: Runs) -> list[str]:
    """Returns seeds, reward and share of exact matches of an arm."""
    exact = estimate([run["exact_after"] for run in runs.values()])
    return [", ".join(map(str, runs)), str(after(runs)), str(exact)]


def missing(cells: Mapping[str, Cell]) -> str:
    """Lists the arms without a run."""
    ran = {run["arm"] for run in cells.values()}
    return ", ".join(f"`{arm}`" for arm in ARMS if arm not in ran) or "none"


ENTRIES: dict[str, Callable[[Mapping[str, Cell]], str]] = {
    "algorithms_rewards": lambda cells: rewards(cells, reference()),
    "algorithms_missing": missing,
}
CLAIMS: dict[str, Callable[[Mapping[str, Cell]], bool]] = {
    "algorithms_are_not_compared": lambda cells: not cells,
}
