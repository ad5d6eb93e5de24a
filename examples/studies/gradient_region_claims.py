"""The conclusions of docs/gradient_study.md about modes, log-ratios and trust regions."""

from __future__ import annotations

from collections.abc import Callable

from gradient_region_rows import (
    BY_NAME,
    COLUMNS,
    ENOUGH,
    FACTORS,
    UNCLIPPED,
    WIDE_MISMATCHES,
    WIDE_PROBLEMS,
    mean,
    problems,
    rollouts_own,
    short,
)
from gradient_regions import CHOICES
from gradient_rows import Cells

UPDATES = ("first", "second")
AUTO = "bypass_centered_auto"
PLAIN = ("bypass_plain_none", "decoupled_plain_none")
# Rollouts whose mismatch is of the size of an update, or smaller.
PRECISE = ("bf16", "int8", "guidance")


def never_clearly_below(cells: Cells, names: list[str], update: str) -> bool:
    """Tells whether no cosine is below `ENOUGH` by more than two standard errors, nor any mean.

    Args:
      cells: the cells of the study.
      names: of the estimators.
      update: `first` or `second`.
    """
    return all(
        short(cells, update, BY_NAME[name]).clearly == 0
        and all(mean(cells, m, name, update).value >= ENOUGH for m in COLUMNS)
        for name in names
    )


def same(cells: Cells, one: str, other: str) -> bool:
    """Tells whether two estimators have the same cosine everywhere."""
    return all(
        problems(cells, m, one, update) == problems(cells, m, other, update)
        for m in COLUMNS
        for update in UPDATES
    )


def apart(cells: Cells, one: str, other: str, update: str) -> float:
    """Returns the largest difference of the mean cosines of two estimators."""
    return max(
        abs(mean(cells, m, one, update).value - mean(cells, m, other, update).value)
        for m in COLUMNS
    )


def highest(cells: Cells, name: str, update: str, quantity: str = "cosine") -> float:
    """Returns the highest mean of a quantity over mismatches."""
    return max(mean(cells, m, name, update, quantity).value for m in COLUMNS)


def width(cells: Cells, problem: str, mismatch: str, estimator: str, update: str) -> float:
    """Returns the cosine of an estimator of the study of widths."""
    found: float = cells[f"widths_{mismatch}_{problem}"][update][estimator][0]
    return found


CLAIMS: dict[str, Callable[[Cells], bool]] = {
    "gradient_centered_is_right": lambda c: never_clearly_below(
        c, [choice.name for choice in UNCLIPPED], "first"
    ),
    "gradient_plain_is_wrong": lambda c: all(
        mean(c, m, name, "first").value < 0.7 for m in ("int4", "stale_8") for name in PLAIN
    ),
    "gradient_plain_is_near": lambda c: all(
        mean(c, m, name, "first").value > 0.9 for m in PRECISE for name in PLAIN
    ),
    "gradient_auto_fails_for_old": lambda c: (
        all(mean(c, m, "bypass_centered_auto", "first").value > ENOUGH for m in (*PRECISE, "int4"))
        and mean(c, "stale_8", "bypass_centered_auto", "first").value < 0.9
    ),
    "gradient_exact_second": lambda c: all(
        mean(c, "exact", f"{mode}_plain_none", "second").value < 0.95
        and mean(c, "exact", f"{mode}_centered_none", "second").value > 0.99
        for mode in ("bypass", "decoupled")
    ),
    "gradient_centered_modes_agree": lambda c: (
        apart(c, "bypass_centered_none", "decoupled_centered_none", "first") < 0.02
    ),
    # A published bound lets the centered log-ratio pull as it does the plain one.
    "gradient_published_turns_centered": lambda c: (
        highest(c, "bypass_centered_published", "first") < 0.9
        and highest(c, "bypass_centered_dppo", "first") < 0.9
    ),
    "gradient_published_turns_second": lambda c: all(
        highest(c, choice.name, "second") < 0
        for choice in CHOICES
        if choice.mode == "decoupled" and choice.region in ("published", "dppo")
    ),
    "gradient_unclipped_second": lambda c: all(
        mean(c, m, choice.name, "second").value > 0.93 for m in COLUMNS for choice in UNCLIPPED
    ),
    "gradient_random_is_silent": lambda c: all(
        mean(c, m, choice.name, "first", "chance").value < 0.06
        for m in COLUMNS
        for choice in UNCLIPPED
    ),
    "gradient_random_published": lambda c: all(
        mean(c, m, "bypass_centered_published", "first", "chance").value > 0.5 for m in COLUMNS
    ),
    "gradient_sweep_turns": lambda c: all(
        mean(c, m, choice.name, "first").value < ENOUGH and rollouts_own(c, m).value < ENOUGH
        for m in ("int4x4", "int4x8")
        for choice in UNCLIPPED
    ),
    "gradient_sweep_holds": lambda c: all(
        mean(c, m, choice.name, "first").value >= ENOUGH
        for m in ("int4x0.5", "int4x1", "int4x2")
        for choice in UNCLIPPED
    ),
    "gradient_sweep_plain": lambda c: all(
        mean(c, m, name, "first").value < 0.6 for m in FACTORS for name in PLAIN
    ),
    # A clip of 16 robust deviations lets old weights pass; of 32, an update as well.
    "gradient_widths_before": lambda c: all(
        width(c, problem, m, "bypass_auto_16", "first") >= 0.95
        for problem in WIDE_PROBLEMS
        for m in WIDE_MISMATCHES
    ),
    "gradient_widths_after": lambda c: all(
        width(c, problem, m, name, "second") >= 0.93
        for problem in WIDE_PROBLEMS
        for m in WIDE_MISMATCHES
        for name in ("bypass_auto_32", "decoupled_0.01")
    ),
    "gradient_widths_narrow": lambda c: all(
        width(c, problem, m, "decoupled_0.001", "second") < 0.5
        for problem in WIDE_PROBLEMS
        for m in WIDE_MISMATCHES
    ),
}
