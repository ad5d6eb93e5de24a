"""The tables, numbers and conclusions of docs/gradient_study.md, from the gradient study."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import gradient_image_rows
import gradient_region_claims
import gradient_region_entries
from gradient_claims import CLAIMS as CORRECTION_CLAIMS
from gradient_rows import (
    LOW_PRECISION,
    MAIN,
    MISMATCHES,
    NAMES,
    SIZES,
    STALE,
    SYSTEMATIC,
    UNBOUNDED,
    Cells,
    cell,
    fixed,
    highest,
    lowest,
    number,
    one,
    shown,
)
from tables import markdown

STUDY = "gradient"


def by_estimator(quantity: str, cells: Cells) -> str:
    """Makes a table with one row for each estimator and one column for each mismatch."""
    rows = [
        [label, *(shown(cells, name, key, quantity) for name in MISMATCHES)]
        for key, label in NAMES.items()
    ]
    return markdown(["", *MISMATCHES.values()], rows)


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


def by_size(cells: Cells) -> str:
    """Makes the table of two mismatches on flows of several sizes."""
    rows = []
    for name in ("bf16", "int4"):
        for size in SIZES:
            floor = cell(cells, name, size)["calibration"]["floor"]
            cosines = [
                one(cells, name, key, "cosine", size)
                for key in ("bypass", "recomputed", "guard_calibrated")
            ]
            sampled = one(cells, name, UNBOUNDED, "effective_samples", size)
            noise = one(cells, name, UNBOUNDED, "variance", size)
            floors = [number(floor), number(floor * size)]
            angles = map(fixed, cosines)
            rows.append([MISMATCHES[name], size, *floors, *angles, fixed(sampled), f"{noise:.1f}"])
    header = [
        "rollout",
        "elements",
        "floor",
        "floor of the sum",
        "bypass",
        "recomputed",
        "Guard, calibrated",
    ]
    return markdown([*header, "samples left, sum", "variance, sum"], rows)


def trajectories(cells: Cells) -> str:
    """Formats the number of trajectories that the truth was measured on."""
    truth = cells[f"truth_{MAIN}"]
    return f"{truth['truth_batches'] * truth['samples_per_batch']:,}"


def a_cosine(mismatch: str, estimator: str) -> Callable[[Cells], str]:
    """Makes an entry: the cosine of an estimator with the truth."""
    return lambda cells: fixed(one(cells, mismatch, estimator, "cosine"))


ENTRIES: dict[str, Callable[[Cells], str]] = {
    "gradient_mismatch": mismatch_table,
    "gradient_sizes": by_size,
    **{
        f"gradient_{name}": partial(by_estimator, name)
        for name in ("bias", "cosine", "variance", "gated", "chance")
    },
    "gradient_trajectories": trajectories,
    "gradient_truth_error": lambda cells: f"{cells[f'truth_{MAIN}']['relative_error']:.0%}",
    "gradient_guard_cosine": lambda cells: fixed(cells[f"truth_{MAIN}"]["guard_cosine"]),
    "gradient_reward_before": lambda cells: fixed(cells[f"truth_{MAIN}"]["reward_by_update"][0]),
    "gradient_reward_after": lambda cells: fixed(cells[f"truth_{MAIN}"]["reward_by_update"][-1]),
    "gradient_gated_low": lambda cells: f"{lowest(cells, 'bypass', 'gated'):.0%}",
    "gradient_gated_high": lambda cells: f"{highest(cells, 'bypass', 'gated'):.0%}",
    "gradient_pull_cosine": lambda cells: fixed(lowest(cells, "bypass", "to_rollout", SYSTEMATIC)),
    "gradient_chance_bf16": lambda cells: fixed(one(cells, "bf16", "bypass", "chance")),
    "gradient_chance_stale_1": lambda cells: fixed(one(cells, "stale_1", "bypass", "chance")),
    "gradient_bypass_bf16": a_cosine("bf16", "bypass"),
    "gradient_bypass_guidance": a_cosine("guidance", "bypass"),
    "gradient_bypass_rounding": a_cosine("rounding", "bypass"),
    "gradient_bypass_stale_1": a_cosine("stale_1", "bypass"),
    "gradient_calibrated_bf16": a_cosine("bf16", "bypass_calibrated"),
    "gradient_recomputed_bf16": a_cosine("bf16", "recomputed"),
    "gradient_recomputed_stale_8": a_cosine("stale_8", "recomputed"),
    "gradient_recomputed_int4": a_cosine("int4", "recomputed"),
    "gradient_guard_lowest": lambda cells: fixed(lowest(cells, "guard_calibrated", "cosine")),
    "gradient_guard_recomputed_lowest": lambda cells: fixed(
        lowest(cells, "guard_recomputed", "cosine")
    ),
    "gradient_sum_samples_int4": lambda cells: fixed(
        one(cells, "int4", UNBOUNDED, "effective_samples")
    ),
    "gradient_auto_k1": lambda cells: (
        f"{highest(cells, 'bypass_auto_k1', 'rejected', LOW_PRECISION):.1%}"
    ),
    "gradient_auto_step_kl": lambda cells: (
        f"{highest(cells, 'bypass_auto_step_kl', 'rejected', LOW_PRECISION):.1%}"
    ),
    "gradient_auto_stale": lambda cells: (
        f"{highest(cells, 'bypass_auto_k1', 'rejected', STALE):.1%}"
    ),
    "gradient_sum_variance_int4": lambda cells: f"{one(cells, 'int4', UNBOUNDED, 'variance'):.0f}",
    "gradient_along_stale_8": lambda cells: f"{one(cells, 'stale_8', 'recomputed', 'along'):.1f}",
    **gradient_region_entries.ENTRIES,
    **gradient_image_rows.ENTRIES,
}
CLAIMS: dict[str, Callable[[Cells], bool]] = {
    **CORRECTION_CLAIMS,
    **gradient_region_claims.CLAIMS,
    **gradient_image_rows.CLAIMS,
}
