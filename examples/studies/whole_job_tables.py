"""The numbers of docs/evidence.md and README.md that come from whole runs of the bundled job."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from cells import Cell
from estimates import Estimate, by_cell, difference
from whole_job import ARMS, FIRST_SEEDS, STUDY

__all__ = ["CLAIMS", "ENTRIES", "STUDY"]

LIMIT = 2.0  # standard errors, beyond which one arm ends ahead of another


def gap(rollout: str, arm: str, to: str, cells: Mapping[str, Cell]) -> Estimate:
    """Computes the reward of an arm's runs less that of another arm's runs of the same seed."""
    found = by_cell(cells, (rollout,), tuple(ARMS[rollout]))
    between = difference(found[rollout, arm], found[rollout, to])
    assert between is not None
    return between


def beaten(found: Estimate) -> bool:
    """Tells whether a difference is below 0 by more than `LIMIT` standard errors."""
    return found.mean < -LIMIT * found.error


def shipped(value: str, cells: Mapping[str, Cell]) -> str:
    """Formats a number of the job as it is shipped, with its own seed."""
    return f"{_shipped(cells)[FIRST_SEEDS['shipped']][value]:.3f}"


def others(cells: Mapping[str, Cell]) -> str:
    """Formats the rewards of the shipped job with other seeds."""
    own = FIRST_SEEDS["shipped"]
    return ", ".join(f"{run['after']:.3f}" for seed, run in _shipped(cells).items() if seed != own)


def _shipped(cells: Mapping[str, Cell]) -> Mapping[int, Cell]:
    return by_cell(cells, ("shipped",), ("default",))["shipped", "default"]


centered = partial(gap, "bf16", "centered", "plain")
guard = partial(gap, "int4", "guard", "centered")

ENTRIES: dict[str, Callable[[Mapping[str, Cell]], str]] = {
    "whole_job_gap": lambda cells: centered(cells).signed,
    "whole_job_pairs": lambda cells: str(centered(cells).count),
    "whole_job_guard": lambda cells: guard(cells).signed,
    "whole_job_guard_pairs": lambda cells: str(guard(cells).count),
    "shipped_before": partial(shipped, "before"),
    "shipped_after": partial(shipped, "after"),
    "shipped_exact_before": partial(shipped, "exact_before"),
    "shipped_exact_after": partial(shipped, "exact_after"),
    "shipped_others": others,
}
CLAIMS: dict[str, Callable[[Mapping[str, Cell]], bool]] = {
    "whole_job_is_open": lambda cells: abs(centered(cells).mean) < centered(cells).half,
    "whole_job_guard_holds": lambda cells: (
        abs(guard(cells).mean) < guard(cells).half and not beaten(guard(cells))
    ),
}
