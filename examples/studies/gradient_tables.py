"""What docs/evidence.md shows of the gradient study: its tables, the numbers inside its sentences, its conclusions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from cells import Cell
from tables import markdown

STUDY = "gradient"
MAIN = 64
SIZES = (16, 64, 256)
MISMATCHES = {
    "bf16": "bf16",
    "int8": "int8",
    "int4": "int4",
    "guidance": "guidance +1%",
    "stale_1": "1 old",
    "stale_2": "2 old",
    "stale_4": "4 old",
    "stale_8": "8 old",
}
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
    return cells[f"{mismatch}_{elements}"]


def one(cells: Cells, mismatch: str, estimator: str, quantity: str, elements: int = MAIN) -> Any:
    """A quantity of an estimator; the value alone where there is an error beside it. nan where it has none."""
    found = cell(cells, mismatch, elements)["estimators"][estimator][quantity]
    if found is None:
        return float("nan")
    return found[0] if isinstance(found, list) else found


def by_estimator(quantity: str, cells: Cells) -> str:
    """One row for each estimator, one column for each mismatch."""
    rows = [[label, *(shown(cells, name, key, quantity) for name in MISMATCHES)] for key, label in NAMES.items()]
    return markdown(["", *MISMATCHES.values()], rows)


def shown(cells: Cells, mismatch: str, estimator: str, quantity: str) -> str:
    """Value and, where it is known, standard error; no digit that the error does not support."""
    found = cell(cells, mismatch)["estimators"][estimator][quantity]
    if found is None:
        return "-"
    if not isinstance(found, list):
        return f"{found:.2f}"
    value, error = found
    digits = 2 if error >= 0.005 else 3
    return f"{value:.{digits}f} ± {error:.{digits}f}"


def number(value: float) -> str:
    """Two significant digits."""
    return f"{value:.2g}".replace("e-0", "e-")


def mismatch_table(cells: Cells) -> str:
    header = ["rollout", "floor", "first step", "last step", "p99", "over clip 1e-4", "outside 1e-4", "calibrated clip"]
    rows = []
    for name, label in MISMATCHES.items():
        seen = cell(cells, name)["calibration"]
        sizes = [seen["floor"], seen["by_step"][0], seen["by_step"][-1], seen["absolute"]["p99"]]
        over, outside = seen["absolute"]["p50"] / 1e-4, one(cells, name, "bypass", "clip_fraction")
        rows.append([label, *map(number, sizes), f"{over:.1f}", f"{outside:.0%}", number(seen["clip"])])
    return markdown(header, rows)


def headline(cells: Cells) -> str:
    """The shortest table that answers the question: length and direction of what is left of the gradient."""
    chosen = (
        "bypass",
        "bypass_calibrated",
        "recomputed",
        "decoupled_token_mean",
        "decoupled_sequence_sum",
        "reinforce_sequence",
        "guard",
    )
    rows = [[NAMES[key], *(f"{one(cells, name, key, 'cosine'):.2f}" for name in MISMATCHES)] for key in chosen]
    return markdown(["", *MISMATCHES.values()], rows)


def size_table(cells: Cells) -> str:
    rows = []
    for name in ("bf16", "int4"):
        for size in SIZES:
            of = partial(one, cells, name, elements=size)
            floor = cell(cells, name, size)["calibration"]["floor"]
            rows.append(
                [
                    MISMATCHES[name],
                    size,
                    number(floor),
                    number(floor * size),
                    *(f"{of(estimator=key, quantity='bias'):.2f}" for key in ("bypass", "recomputed")),
                    f"{of(estimator='decoupled_sequence_sum_unbounded', quantity='effective_samples'):.2f}",
                    f"{of(estimator='decoupled_sequence_sum_unbounded', quantity='variance'):.1f}",
                ]
            )
    header = ["rollout", "elements", "floor", "floor of the sum", "bias, bypass", "bias, recomputed"]
    return markdown([*header, "effective samples, `sequence`, sum", "its variance"], rows)


ENTRIES: dict[str, Callable[[Cells], str]] = {
    "gradient_mismatch": mismatch_table,
    "gradient_headline": headline,
    "gradient_sizes": size_table,
    **{f"gradient_{name}": partial(by_estimator, name) for name in ("bias", "cosine", "variance", "gated", "chance")},
}


CLAIMS: dict[str, Callable[[Cells], bool]] = {}
