"""The entries of docs/gradient_study.md about modes, log-ratios and trust regions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import fmean

from gradient_region_rows import (
    AFTER,
    COLUMNS,
    FACTORS,
    HEADLINE,
    by_elements,
    cosines,
    fitting,
    lowest,
    mean,
    means,
    of_size,
    rollouts_own,
    short,
    shortfalls,
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


def total_short(update: str, cells: Cells) -> str:
    """Formats how many cosines of the right estimators are below `ENOUGH`, of how many."""
    found = [short(cells, update, choice) for choice in fitting()]
    below = sum(sum(one.below.values()) for one in found)
    return f"{below} of {sum(one.total for one in found)}"


ENTRIES: dict[str, Callable[[Cells], str]] = {
    "gradient_first": partial(cosines, "first", HEADLINE),
    "gradient_second": partial(cosines, "second", AFTER),
    "gradient_first_all": partial(means, "first", "cosine"),
    "gradient_second_all": partial(means, "second", "cosine"),
    "gradient_random": partial(means, "first", "chance"),
    "gradient_random_second": partial(means, "second", "chance"),
    "gradient_short_first": partial(shortfalls, "first"),
    "gradient_short_second": partial(shortfalls, "second"),
    "gradient_widths": width_table,
    "gradient_by_elements": by_elements,
    "gradient_targets": partial(targets, COLUMNS, "cosine"),
    "gradient_sweep": partial(targets, FACTORS, "weight error of int4, times"),
    "gradient_problems": count_problems,
    "gradient_short_first_total": partial(total_short, "first"),
    "gradient_short_second_total": partial(total_short, "second"),
    "gradient_plain_int4": a_mean("int4", "bypass_plain_none"),
    "gradient_plain_stale_8": a_mean("stale_8", "bypass_plain_none"),
    "gradient_auto_stale_8": a_mean("stale_8", "bypass_centered_auto"),
    "gradient_auto_lost": lambda c: f"{lost(c, 'stale_8', 'bypass_centered_auto', 'first'):.1%}",
    "gradient_exact_plain": a_mean("exact", "decoupled_plain_none", "second"),
    "gradient_exact_centered": a_mean("exact", "decoupled_centered_none", "second"),
    "gradient_published_second": a_mean("bf16", "decoupled_centered_published", "second"),
    "gradient_auto_guidance": a_mean("guidance", "bypass_centered_auto", "second"),
    "gradient_own_stale_8": lambda c: rollouts_own(c, "stale_8").text,
    "gradient_update_floors": lambda c: floors(c, "stale_1"),
    "gradient_guidance_floors": lambda c: floors(c, "guidance"),
    "gradient_random_bf16": a_mean("bf16", "bypass_centered_published", "first", "chance"),
    "gradient_random_stale_1": a_mean("stale_1", "bypass_centered_published", "first", "chance"),
    "gradient_random_auto": a_mean("stale_8", "bypass_centered_auto", "first", "chance"),
    "gradient_sweep_least": lambda c: mean(c, "int4x8", "bypass_centered_none", "first").text,
    "gradient_sweep_own": lambda c: rollouts_own(c, "int4x8").text,
    "gradient_least_decoupled": a_lowest("decoupled_centered_none"),
    "gradient_least_bypass": a_lowest("bypass_centered_none"),
    "gradient_least_guard": a_lowest("guard_bypass_plain_none"),
    "gradient_plain_int8_least": lambda c: lowest(c, "int8", "bypass_plain_none", "first").text,
    "gradient_auto_least": a_lowest("bypass_centered_auto"),
    "gradient_ratio_bypass": lambda c: (
        mean(of_size(c, 16), "int4", "bypass_centered_none", "first").text
    ),
    "gradient_ratio_decoupled": lambda c: (
        mean(of_size(c, 16), "int4", "decoupled_centered_none", "first").text
    ),
}
