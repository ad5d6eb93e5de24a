"""The conclusions of docs/gradient_study.md about weights, rejection and the width of the clip."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from gradient_rows import (
    MISMATCHES,
    NAMES,
    PRECISE,
    SIZES,
    SYSTEMATIC,
    UNBOUNDED,
    Cells,
    cell,
    highest,
    lowest,
    one,
)


def close(
    cells: Cells, one_name: str, other: str, quantity: str, within: float, among: Iterable[str]
) -> bool:
    """Tells whether two estimators agree in a quantity.

    Args:
      cells: the cells of the study.
      one_name: name of one estimator.
      other: name of the other.
      quantity: name of the quantity.
      within: the largest difference.
      among: names of the mismatches.

    Returns:
      True if they agree under all these mismatches.
    """
    pairs = [[one(cells, name, key, quantity) for key in (one_name, other)] for name in among]
    return all(abs(a - b) <= within for a, b in pairs)


def rising(values: Sequence[float]) -> bool:
    """Tells whether no value is below the one before it."""
    return list(values) == sorted(values)


CLAIMS: dict[str, Callable[[Cells], bool]] = {
    # A clip below the mismatch loses up to half of the gradient, and pulls towards the rollout's
    # policy.
    "gradient_reference_clip_gates": lambda c: (
        0.35 < lowest(c, "bypass", "gated") < highest(c, "bypass", "gated") < 0.6
    ),
    "gradient_clip_pulls": lambda c: (
        lowest(c, "bypass", "chance", SYSTEMATIC) > 0.5
        and lowest(c, "bypass", "to_rollout", SYSTEMATIC) > 0.9
    ),
    "gradient_rounding_only_shortens": lambda c: (
        one(c, "rounding", "bypass", "cosine") > 0.98
        and one(c, "rounding", "bypass", "along") < 0.7
        and one(c, "rounding", "bypass", "chance") < 0.05
    ),
    "gradient_calibrated_clip_helps": lambda c: (
        lowest(c, "bypass_calibrated", "cosine", PRECISE) > 0.98
        and highest(c, "bypass_calibrated", "gated") < 0.01
        and all(
            one(c, m, "bypass_calibrated", "bias") < one(c, m, "bypass", "bias") for m in MISMATCHES
        )
    ),
    "gradient_four_floors": lambda c: (
        lowest(c, "bypass_clip_4", "cosine", PRECISE) > 0.98
        and lowest(c, "bypass_clip_1", "cosine", PRECISE) < 0.9
    ),
    "gradient_mean_weights_do_nothing": lambda c: all(
        close(c, f"{kind}_{level}{scale}", none, "cosine", 0.02, MISMATCHES)
        for kind, none, scale in (
            ("decoupled", "recomputed", "_mean"),
            ("reinforce", "reinforce", ""),
        )
        for level in ("token", "sequence", "geometric")
    ),
    "gradient_reinforce_is_recomputed": lambda c: close(
        c, "reinforce", "recomputed", "bias", 1e-6, MISMATCHES
    ),
    "gradient_token_bands_never_fire": lambda c: (
        highest(c, "bypass_band_of_tokens", "rejected") == 0
        and close(c, "bypass_band_of_tokens", "bypass_calibrated", "bias", 0, MISMATCHES)
    ),
    "gradient_rejection_does_not_help": lambda c: all(
        close(c, key, "bypass_calibrated", "cosine", 0.08, MISMATCHES)
        for key in NAMES
        if key.startswith("bypass_") and key != "bypass_calibrated"
    ),
    "gradient_sum_weights_work_while_small": lambda c: (
        highest(c, "decoupled_token_sum", "bias", (*PRECISE, "stale_1")) < 0.05
        and lowest(c, UNBOUNDED, "cosine", (*PRECISE, "stale_1")) > 0.99
    ),
    "gradient_sum_weights_end": lambda c: (
        one(c, "int4", UNBOUNDED, "effective_samples") < 0.1
        and one(c, "int4", UNBOUNDED, "variance") > 10
    ),
    "gradient_guard_is_right": lambda c: (
        lowest(c, "guard_calibrated", "cosine") > 0.97
        and highest(c, "guard_calibrated", "variance") < 1.1
    ),
    "gradient_guard_needs_bypass": lambda c: all(
        one(c, m, "guard_recomputed", "bias") > one(c, m, "guard_calibrated", "bias")
        for m in SYSTEMATIC
    ),
    "gradient_guard_reference_clip": lambda c: highest(c, "guard", "cosine", SYSTEMATIC) < 0.9,
    "gradient_sizes_grow": lambda c: all(
        rising([one(c, name, "recomputed", "bias", size) for size in SIZES])
        and rising([-cell(c, name, size)["calibration"]["floor"] for size in SIZES])
        for name in ("bf16", "int4")
    ),
    "gradient_dppo": lambda c: close(
        c, "dppo_calibrated", "bypass_calibrated", "cosine", 0.05, MISMATCHES
    ),
}
