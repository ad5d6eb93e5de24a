"""The tables and conclusions of docs/gradient_study.md about modes, log-ratios and trust regions.

A problem is a size of the flow with a seed. `first` is the gradient before an update, `second` the
one after it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import NamedTuple

from gradient_regions import CHOICES, Choice
from gradient_rows import Cells
from tables import markdown

COLUMNS = {
    "bf16": "bf16",
    "int8": "int8",
    "int4": "int4",
    "guidance": "guidance +1%",
    "stale_1": "1 old",
    "stale_8": "8 old",
}
ELEMENTS = (16, 64, 256)
# Multiples of the weight error of int4.
FACTORS = {f"int4x{factor}": factor for factor in ("0.5", "1", "2", "4", "8")}
ENOUGH = 0.97  # a cosine that the page calls right
# The bounds that let the mismatch pass. The published ones are below it.
FITTING = ("none", "calibrated", "auto", "dppo_auto")
REGION_NAMES = {
    "none": "no clip",
    "published": "published clip",
    "calibrated": "calibrated clip",
    "auto": "clip `auto:4`",
    "dppo": "Flow-DPPO, published",
    "dppo_auto": "Flow-DPPO, `auto:4`",
}
HEADLINE = (
    "bypass_plain_published",
    "bypass_plain_none",
    "bypass_plain_auto",
    "decoupled_plain_none",
    "guard_decoupled_plain_none",
    "bypass_centered_published",
    "bypass_centered_none",
    "bypass_centered_calibrated",
    "bypass_centered_auto",
    "bypass_centered_dppo_auto",
    "decoupled_centered_none",
    "guard_bypass_plain_none",
    "guard_bypass_plain_auto",
    "guard_decoupled_centered_none",
)
AFTER = (*HEADLINE, "decoupled_centered_published", "decoupled_centered_calibrated")
SWEPT = {
    "bypass_plain_none": "bypass, plain",
    "decoupled_plain_none": "recomputed, plain",
    "bypass_centered_none": "bypass, centered",
    "decoupled_centered_none": "recomputed, centered",
    "guard_bypass_plain_none": "Guard, bypass",
}
# The problems and mismatches on which the width of the clip varies.
WIDE_PROBLEMS = ("256_2", "64_0")
WIDE_MISMATCHES = {"guidance": "guidance", "stale_1": "1 old", "stale_8": "8 old"}
BY_NAME = {choice.name: choice for choice in CHOICES}


class Value(NamedTuple):
    """A number with its standard error."""

    value: float
    error: float

    @property
    def text(self) -> str:
        """Returns the value with the error of its last digits, as 0.97(2) or 0.970(14).

        0 is a value that the noise hides.
        """
        if math.isnan(self.value):
            return "-"
        if self.value == 0:
            return "0"
        digits = next((d for d in range(3) if round(self.error * 10**d) >= 2), 3)
        return f"{self.value:.{digits}f}({self.error * 10**digits:.0f})"


def label(choice: Choice) -> str:
    """Returns the name of an estimator on the page."""
    mode = "bypass" if choice.mode == "bypass" else "recomputed"
    kind = "Guard, " if choice.guard else ""
    return f"{kind}{mode}, {choice.ratio}, {REGION_NAMES[choice.region]}"


def problems(
    cells: Cells, mismatch: str, estimator: str, update: str, quantity: str = "cosine"
) -> list[Value]:
    """Returns a quantity of an estimator on every problem.

    Args:
      cells: the cells of the study.
      mismatch: name of the mismatch.
      estimator: name of the estimator.
      update: `first` or `second`.
      quantity: one of `gradient_study.COLUMNS` that has an error.

    Returns:
      One value for each problem where the noise does not hide it.
    """
    found = []
    for name, cell in cells.items():
        if name.startswith(f"regions_{mismatch}_") and update in cell:
            place = cell["columns"].index(quantity)
            value, error = cell[update][estimator][place : place + 2]
            if value is not None:
                found.append(Value(value, error))
    return found


def lowest(cells: Cells, mismatch: str, estimator: str, update: str) -> Value:
    """Returns the lowest cosine over problems; arguments as in `problems`."""
    return min(problems(cells, mismatch, estimator, update), default=Value(math.nan, 0))


def mean(
    cells: Cells, mismatch: str, estimator: str, update: str, quantity: str = "cosine"
) -> Value:
    """Returns the mean over problems and its standard error; arguments as in `problems`."""
    found = problems(cells, mismatch, estimator, update, quantity)
    return averaged([one.value for one in found])


def averaged(values: Sequence[float]) -> Value:
    """Returns the mean of values and its standard error; nan if there are fewer than two."""
    if len(values) < 2:
        return Value(math.nan, math.nan)
    return Value(fmean(values), stdev(values) / len(values) ** 0.5)


def cosines(update: str, names: Sequence[str], cells: Cells) -> str:
    """Makes the table of the lowest cosine of each estimator under each mismatch."""
    rows = [
        [label(BY_NAME[name]), *(lowest(cells, m, name, update).text for m in COLUMNS)]
        for name in names
    ]
    return markdown(["lowest cosine", *COLUMNS.values()], rows)


def means(update: str, quantity: str, cells: Cells) -> str:
    """Makes the table of the mean of a quantity of every estimator over problems."""
    rows = [
        [label(choice), *(mean(cells, m, choice.name, update, quantity).text for m in COLUMNS)]
        for choice in CHOICES
    ]
    return markdown(["mean", *COLUMNS.values()], rows)


class Short(NamedTuple):
    """The cosines of one estimator that are below `ENOUGH`.

    Attributes:
      choice: the estimator.
      below: mismatch -> number of problems below.
      clearly: number of problems that are below by more than two standard errors.
      least: the lowest cosine.
      total: number of problems of all mismatches.
    """

    choice: Choice
    below: dict[str, int]
    clearly: int
    least: Value
    total: int


def short(cells: Cells, update: str, choice: Choice) -> Short:
    """Counts where an estimator has a cosine below `ENOUGH`."""
    found = {m: problems(cells, m, choice.name, update) for m in COLUMNS}
    everything = [value for values in found.values() for value in values]
    below = {m: sum(one.value < ENOUGH for one in values) for m, values in found.items()}
    return Short(
        choice,
        {m: count for m, count in below.items() if count},
        sum(one.value + 2 * one.error < ENOUGH for one in everything),
        min(everything),
        len(everything),
    )


def is_bypass_guard(choice: Choice) -> bool:
    """Returns whether an estimator centers by itself, as Guard does in bypass mode."""
    return choice.guard and choice.mode == "bypass"


def fitting() -> list[Choice]:
    """Returns the estimators that credit the rollout's noise, with a bound above the mismatch."""
    return [
        choice
        for choice in CHOICES
        if (choice.ratio == "plain" if is_bypass_guard(choice) else choice.ratio == "centered")
        and choice.region in FITTING
    ]


def of_size(cells: Cells, size: int) -> Cells:
    """Returns the cells of one size of the flow."""
    return {name: cell for name, cell in cells.items() if f"_{size}_" in name}


def width_table(cells: Cells) -> str:
    """Makes the table of cosines by the width of the clip, before an update and after it."""
    rows = []
    for problem in WIDE_PROBLEMS:
        found = {m: cells[f"widths_{m}_{problem}"] for m in WIDE_MISMATCHES}
        size, seed = problem.split("_")
        for name in found["stale_1"]["first"]:
            values = [
                Value(*found[m][update][name][:2]).text
                for m in WIDE_MISMATCHES
                for update in ("first", "second")
            ]
            mode, _, width = name.replace("auto_", "auto:").partition("_")
            text = (
                f"recomputed, {float(width):.0e}".replace("e-0", "e-")
                if mode == "decoupled"
                else f"bypass, `{width}`"
            )
            rows.append([f"{size} elements, seed {seed}", text, *values])
    header = [
        f"{text}, {when}" for text in WIDE_MISMATCHES.values() for when in ("before", "after")
    ]
    return markdown(["problem", "clip", *header], rows)


def rollouts_own(cells: Cells, mismatch: str) -> Value:
    """Returns the mean cosine of the rollout's own gradient with the policy's, over problems."""
    own = [
        cell["rollout_cosine"][0]
        for name, cell in cells.items()
        if name.startswith(f"regions_{mismatch}_") and cell["rollout_cosine"] is not None
    ]
    return averaged(own)


def targets(mismatches: Mapping[str, str], corner: str, cells: Cells) -> str:
    """Makes the table of cosines with our gradient and with the rollout's own, means over problems.

    Args:
      mismatches: name of a mismatch -> title of its column.
      corner: title of the first column.
      cells: the cells of the study.
    """
    rows = [["the rollout's own with ours", *(rollouts_own(cells, m).text for m in mismatches)]]
    for name, text in SWEPT.items():
        for quantity, whose in (("cosine", "ours"), ("rollout_cosine", "the rollout's")):
            values = [mean(cells, m, name, "first", quantity).text for m in mismatches]
            rows.append([f"{text}, with {whose}", *values])
    return markdown([corner, *mismatches.values()], rows)


UNCLIPPED = [choice for choice in fitting() if choice.region == "none"]
