"""Axes of heat maps: round ticks that cover the data, and their labels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis: maps values to 0..1 and says where its labelled ticks are.

    Attributes:
      lower: the value at 0.
      upper: the value at 1.
      ticks: values with a label, ascending.
    """

    lower: float
    upper: float
    ticks: Sequence[float]

    def place(self, value: float) -> float:
        """Returns the place of a value on the axis, from 0 to 1."""
        return (value - self.lower) / (self.upper - self.lower)


def linear_axis(values: Sequence[float], *, whole: bool = False, tight: bool = False) -> Axis:
    """Makes a linear axis with about four intervals between round ticks.

    Args:
      values: the data to cover.
      whole: use whole numbers as ticks.
      tight: end where the data end, not at ticks.
    """
    # The factors of 1e-9 and 1e-12 here and below keep rounding errors from moving a tick.
    lower = min(values)
    upper = max(values)
    if upper - lower <= 1e-12 * max(abs(lower), abs(upper)):
        pad = 0.5 if whole or lower == 0 else abs(lower) * 0.1
        lower = lower - pad
        upper = upper + pad
    step = _nice_step((upper - lower) / 4)
    if whole:
        step = max(1.0, step)
    if not tight:
        lower = math.floor(lower / step + 1e-9) * step
        upper = math.ceil(upper / step - 1e-9) * step
    first = math.ceil(lower / step - 1e-9)
    count = math.floor(upper / step + 1e-9) - first + 1
    return Axis(lower, upper, [(first + i) * step for i in range(count)])


def _nice_step(rough: float) -> float:
    """Returns the smallest of 1, 2 and 5 times powers of ten that is not below `rough`."""
    magnitude = 10.0 ** math.floor(math.log10(rough))
    steps = (factor * magnitude for factor in (1, 2, 5, 10))
    return next(step for step in steps if step >= rough * (1 - 1e-9))


def tick_labels(axis: Axis) -> list[str]:
    """Returns the label of each tick, with as many decimals as the distance of the ticks needs."""
    step = axis.ticks[1] - axis.ticks[0] if len(axis.ticks) > 1 else axis.upper - axis.lower
    largest = max(abs(tick) for tick in axis.ticks)
    if 0 < largest < 1e-3 or largest >= 1e6:
        return ["0" if abs(tick) < step / 2 else _scientific(tick) for tick in axis.ticks]
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return [f"{0.0 if abs(tick) < step / 2 else tick:.{decimals}f}" for tick in axis.ticks]


def _scientific(value: float) -> str:
    """Returns a number as 2e-5 rather than 2.00e-05."""
    mantissa, exponent = f"{value:.3e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"
