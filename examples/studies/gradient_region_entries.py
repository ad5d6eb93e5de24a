"""The entries of docs/gradient_study.md about modes, log-ratios and trust regions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import fmean

from gradient_region_rows import (
    COLUMNS,
    FACTORS,
    HEADLINE,
    cosines,
    lowest,
    mean,
    rollouts_own,
    targets,
    width_table,
)
from gradient_rows import Cells


def lost(cells: Cells, mismatch: str, estimator: str, update: str) -> float:
    """Returns the mean share of the gradient that is lost; arguments as in `problems`."""
    return fmean(
        cell[update][estimator][-1]
        for name, cell in cells.items()
        if name.startswith(f"regions_{mismatch}_")
    )


def floors(cells: Cells, mismatch: str) -> str:
    """Formats the range of the noise floor over problems."""
    found = [
        cell["calibration"]["floor"]
        for name, cell in cells.items()
        if name.startswith(f"regions_{mismatch}_")
    ]
    return f"{min(found):.2g} to {max(found):.2g}"


def a_mean(
    mismatch: str, estimator: str, update: str = "first", quantity: str = "cosine"
) -> Callable[[Cells], str]:
    """Makes an entry: a mean over problems with its error; arguments as in `problems`."""
    return lambda cells: mean(cells, mismatch, estimator, update, quantity).text


def a_lowest(estimator: str) -> Callable[[Cells], str]:
    """Makes an entry: the lowest cosine of an estimator before an update, over everything."""
    return lambda cells: min(lowest(cells, m, estimator, "first") for m in COLUMNS).text


def count_problems(cells: Cells) -> str:
    """Formats the number of problems."""
    return str(len([name for name in cells if name.startswith("regions_int4_")]))


ENTRIES: dict[str, Callable[[Cells], str]] = {
    "gradient_first": partial(cosines, "first", HEADLINE),
    "gradient_widths": width_table,
    "gradient_sweep": partial(targets, FACTORS, "weight error of int4, times"),
    "gradient_problems": count_problems,
    "gradient_plain_int4": a_mean("int4", "bypass_plain_none"),
    "gradient_plain_stale_8": a_mean("stale_8", "bypass_plain_none"),
    "gradient_auto_stale_8": a_mean("stale_8", "bypass_centered_auto"),
    "gradient_auto_lost": lambda c: f"{lost(c, 'stale_8', 'bypass_centered_auto', 'first'):.1%}",
    "gradient_exact_plain": a_mean("exact", "decoupled_plain_none", "second"),
    "gradient_exact_centered": a_mean("exact", "decoupled_centered_none", "second"),
    "gradient_published_second": a_mean("bf16", "decoupled_centered_published", "second"),
    "gradient_update_floors": lambda c: floors(c, "stale_1"),
    "gradient_random_bf16": a_mean("bf16", "bypass_centered_published", "first", "chance"),
    "gradient_random_stale_1": a_mean("stale_1", "bypass_centered_published", "first", "chance"),
    "gradient_sweep_least": lambda c: mean(c, "int4x8", "bypass_centered_none", "first").text,
    "gradient_sweep_own": lambda c: rollouts_own(c, "int4x8").text,
    "gradient_least_decoupled": a_lowest("decoupled_centered_none"),
    "gradient_least_bypass": a_lowest("bypass_centered_none"),
    "gradient_least_guard": a_lowest("guard_bypass_plain_none"),
}
