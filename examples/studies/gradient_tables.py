"""The tables, numbers and conclusions of docs/gradient_study.md, from the gradient study."""

from __future__ import annotations

from collections.abc import Callable

import gradient_image_rows
import gradient_region_claims
import gradient_region_entries
from gradient_claims import CLAIMS as CORRECTION_CLAIMS
from gradient_rows import (
    MAIN,
    MISMATCHES,
    SYSTEMATIC,
    UNBOUNDED,
    Cells,
    cell,
    fixed,
    highest,
    lowest,
    number,
    one,
)
from tables import markdown

STUDY = "gradient"


def mismatch_table(cells: Cells) -> str:
    """Makes the table of the mismatches, with their scales and calibrated clips."""
    header = [
        "rollout",
        "floor",
        "first step",
        "last step",
        "p99",
        "over clip 1e-4",
        "outside 1e-4",
        "calibrated clip",
    ]
    rows = []
    for name, label in MISMATCHES.items():
        seen = cell(cells, name)["calibration"]
        sizes = [seen["floor"], seen["by_step"][0], seen["by_step"][-1], seen["absolute"]["p99"]]
        over = seen["absolute"]["p50"] / 1e-4
        outside = one(cells, name, "bypass", "clip_fraction")
        rows.append(
            [label, *map(number, sizes), f"{over:.1f}", f"{outside:.0%}", number(seen["clip"])]
        )
    return markdown(header, rows)


def trajectories(cells: Cells) -> str:
    """Formats the number of trajectories that the truth was measured on."""
    truth = cells[f"truth_{MAIN}"]
    return f"{truth['truth_batches'] * truth['samples_per_batch']:,}"


def a_cosine(mismatch: str, estimator: str) -> Callable[[Cells], str]:
    """Makes an entry: the cosine of an estimator with the truth."""
    return lambda cells: fixed(one(cells, mismatch, estimator, "cosine"))


ENTRIES: dict[str, Callable[[Cells], str]] = {
    "gradient_trajectories": trajectories,
    "gradient_truth_error": lambda cells: f"{cells[f'truth_{MAIN}']['relative_error']:.0%}",
    "gradient_guard_cosine": lambda cells: fixed(cells[f"truth_{MAIN}"]["guard_cosine"]),
    "gradient_reward_before": lambda cells: fixed(cells[f"truth_{MAIN}"]["reward_by_update"][0]),
    "gradient_reward_after": lambda cells: fixed(cells[f"truth_{MAIN}"]["reward_by_update"][-1]),
    "gradient_gated_low": lambda cells: f"{lowest(cells, 'bypass', 'gated'):.0%}",
    "gradient_gated_high": lambda cells: f"{highest(cells, 'bypass', 'gated'):.0%}",
    "gradient_pull_cosine": lambda cells: fixed(lowest(cells, "bypass", "to_rollout", SYSTEMATIC)),
    "gradient_bypass_bf16": a_cosine("bf16", "bypass"),
    "gradient_bypass_rounding": a_cosine("rounding", "bypass"),
    "gradient_calibrated_bf16": a_cosine("bf16", "bypass_calibrated"),
    "gradient_guard_lowest": lambda cells: fixed(lowest(cells, "guard_calibrated", "cosine")),
    "gradient_guard_recomputed_lowest": lambda cells: fixed(
        lowest(cells, "guard_recomputed", "cosine")
    ),
    "gradient_sum_samples_int4": lambda cells: fixed(
        one(cells, "int4", UNBOUNDED, "effective_samples")
    ),
    "gradient_sum_variance_int4": lambda cells: f"{one(cells, 'int4', UNBOUNDED, 'variance'):.0f}",
    **gradient_region_entries.ENTRIES,
    **gradient_image_rows.ENTRIES,
}
CLAIMS: dict[str, Callable[[Cells], bool]] = {
    **CORRECTION_CLAIMS,
    **gradient_region_claims.CLAIMS,
    **gradient_image_rows.CLAIMS,
}
