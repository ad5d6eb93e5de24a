"""The table of docs/evidence.md that comes from whole runs of the bundled job."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cells import Cell
from learning_tables import Estimate, after, by_cell, difference
from tables import markdown
from whole_job import ARMS, ROLLOUT, STUDY

__all__ = ["CLAIMS", "ENTRIES", "STUDY"]


def rewards(cells: Mapping[str, Cell]) -> str:
    """Makes the table of rewards after training, with the reward of each seed."""
    rows = []
    for (_, arm), runs in by_cell(cells, (ROLLOUT,), tuple(ARMS)).items():
        each = ", ".join(f"{run['after']:.3f}" for run in runs.values())
        rows.append([f"`{arm}`", ", ".join(map(str, runs)), each, after(runs)])
    return markdown(["log-ratio", "seeds", "reward after each", "mean"], rows)


def gap(cells: Mapping[str, Cell]) -> Estimate:
    """Computes the reward of centered runs less that of plain runs of the same seed."""
    found = by_cell(cells, (ROLLOUT,), tuple(ARMS))
    between = difference(found[ROLLOUT, "centered"], found[ROLLOUT, "plain"])
    assert between is not None
    return between


ENTRIES: dict[str, Callable[[Mapping[str, Cell]], str]] = {
    "whole_job_rewards": rewards,
    "whole_job_gap": lambda cells: gap(cells).signed,
    "whole_job_pairs": lambda cells: str(gap(cells).count),
}
CLAIMS: dict[str, Callable[[Mapping[str, Cell]], bool]] = {
    "whole_job_is_open": lambda cells: abs(gap(cells).mean) < gap(cells).half,
}
