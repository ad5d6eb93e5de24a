"""Reads and formats the cells of the gradient study's part about weights and rejection."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from cells import Cell

MAIN = 64
SIZES = (16, 64, 256)
UNBOUNDED = "decoupled_sequence_sum_unbounded"
MISMATCHES = {
    "bf16": "bf16",
    "int8": "int8",
    "int4": "int4",
    "rounding": "rounding",
    "guidance": "guidance +1%",
    "stale_1": "1 old",
    "stale_2": "2 old",
    "stale_4": "4 old",
    "stale_8": "8 old",
}
PRECISE = ("bf16", "int8", "rounding", "guidance")
STALE = tuple(name for name in MISMATCHES if name.startswith("stale"))
SYSTEMATIC = tuple(name for name in MISMATCHES if name != "rounding")
NAMES = {
    "bypass": "bypass, clip 1e-4",
    "bypass_calibrated": "bypass, calibrated clip",
    "recomputed": "recomputed, no weights",
    "decoupled_token_mean": "decoupled, `token`",
    "decoupled_sequence_mean": "decoupled, `sequence`",
    "decoupled_geometric_mean": "decoupled, `geometric`",
    "decoupled_token_sum": "decoupled, `token`, sum",
    "decoupled_sequence_sum": "decoupled, `sequence`, sum",
    "decoupled_geometric_sum": "decoupled, `geometric`, sum",
    "decoupled_sequence_sum_unbounded": "decoupled, `sequence`, sum, no bound",
    "recomputed_seq_mean_k1": "recomputed, `seq_mean_k1`",
    "decoupled_sequence_seq_mean_k1": "decoupled, `sequence`, `seq_mean_k1`",
    "recomputed_auto_k1": "recomputed, `token_k1` `auto:4`",
    "reinforce": "reinforce, no weights",
    "reinforce_token": "reinforce, `token`",
    "reinforce_sequence": "reinforce, `sequence`",
    "reinforce_geometric": "reinforce, `geometric`",
    "reinforce_sequence_sum": "reinforce, `sequence`, sum",
    "guard": "Guard, clip 2e-6",
    "guard_calibrated": "Guard, calibrated clip",
    "guard_recomputed": "Guard, recomputed",
    "dppo": "Flow-DPPO, threshold 1e-5",
    "dppo_calibrated": "Flow-DPPO, calibrated threshold",
    "bypass_band_of_tokens": "bypass*, `seq_mean_k1` 0.5 to 2",
    "bypass_token_k1": "bypass*, `token_k1`",
    "bypass_token_k2": "bypass*, `token_k2`",
    "bypass_token_k3": "bypass*, `token_k3`",
    "bypass_seq_mean_k1": "bypass*, `seq_mean_k1`",
    "bypass_seq_mean_k2": "bypass*, `seq_mean_k2`",
    "bypass_seq_mean_k3": "bypass*, `seq_mean_k3`",
    "bypass_seq_max_k3": "bypass*, `seq_max_k3`",
    "bypass_step_kl": "bypass*, `step_kl`",
    "bypass_auto_k1": "bypass*, `token_k1` `auto:4`",
    "bypass_auto_step_kl": "bypass*, `step_kl` `auto:4`",
}

Cells = Mapping[str, Cell]


def cell(cells: Cells, mismatch: str, elements: int = MAIN) -> Cell:
    """Returns the cell of a mismatch and a size of the flow."""
    return cells[f"{mismatch}_{elements}"]


def one(cells: Cells, mismatch: str, estimator: str, quantity: str, elements: int = MAIN) -> Any:
    """Returns one quantity of an estimator, without its standard error.

    Args:
      cells: the cells of the study.
      mismatch: name of the mismatch.
      estimator: name of the estimator.
      quantity: name of the quantity.
      elements: size of the flow.

    Returns:
      The value; nan if the noise leaves it open.
    """
    found = cell(cells, mismatch, elements)["estimators"][estimator][quantity]
    if found is None:
        return float("nan")
    return found[0] if isinstance(found, list) else found


def shown(cells: Cells, mismatch: str, estimator: str, quantity: str) -> str:
    """Formats a value with the standard error of its last digit, as 0.74(2).

    Args:
      cells: the cells of the study.
      mismatch: name of the mismatch.
      estimator: name of the estimator.
      quantity: name of the quantity.

    Returns:
      The text; 0 if the noise is larger than the value, - if it leaves the value open.
    """
    found = cell(cells, mismatch)["estimators"][estimator][quantity]
    if found is None:
        return "-"
    if not isinstance(found, list):
        return f"{found:.2f}"
    value, error = found
    if value == 0:
        return "0"
    digits = next(digits for digits in range(4) if round(error * 10**digits) >= 1 or digits == 3)
    return f"{value:.{digits}f}({error * 10**digits:.0f})"


def number(value: float) -> str:
    """Formats a number with two significant digits."""
    return f"{value:.2g}".replace("e-0", "e-")


def fixed(value: float) -> str:
    """Formats a number with two digits after the point."""
    return f"{value:.2f}"


def extreme(
    cells: Cells, estimator: str, quantity: str, *, highest: bool, among: Iterable[str] = MISMATCHES
) -> float:
    """Returns the highest or lowest value of a quantity over mismatches.

    Args:
      cells: the cells of the study.
      estimator: name of the estimator.
      quantity: name of the quantity.
      highest: the highest value, or else the lowest.
      among: names of the mismatches.

    Returns:
      The value.
    """
    found = [one(cells, name, estimator, quantity) for name in among]
    return max(found) if highest else min(found)


def lowest(cells: Cells, estimator: str, quantity: str, among: Iterable[str] = MISMATCHES) -> float:
    """Returns the lowest value of a quantity, with the arguments of `extreme`."""
    return extreme(cells, estimator, quantity, highest=False, among=among)


def highest(
    cells: Cells, estimator: str, quantity: str, among: Iterable[str] = MISMATCHES
) -> float:
    """Returns the highest value of a quantity, with the arguments of `extreme`."""
    return extreme(cells, estimator, quantity, highest=True, among=among)
