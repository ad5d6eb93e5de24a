"""A heat map over training steps: one small PNG inside the page, stretched without smoothing, with
HTML labels.
"""

from __future__ import annotations

import base64
import io
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

import numpy as np
from PIL import Image

from flowgrpo_rc.report.axes import linear_axis

_MAX_COLUMNS = 240
_COLORS = "viridis"


def columns_by_step(found: Mapping[int, np.ndarray]) -> np.ndarray:
    """[rows, steps] from the first to the last step, nan where there is none."""
    first = min(found)
    last = max(found)
    whole = np.full((len(next(iter(found.values()))), last - first + 1), math.nan)
    for step, values in found.items():
        whole[:, step - first] = values
    return whole


def heat_map(
    title: str,
    values: np.ndarray,
    first_step: int,
    y_ticks: Sequence[tuple[float, str]],
    *,
    note: str,
    unit: str,
    log: bool = False,
    thresholds: Sequence[float] = (),
) -> str:
    """A titled map of `values` [rows, steps], the first row at the top; nan stays empty.

    y_ticks: height from 0 (bottom) to 1, and label; thresholds: heights of dashed lines; unit: what
        the colour means;
    log: colours by the logarithm, zeros as the lowest. More than 240 steps are averaged in columns.
    """
    joined = _joined(values)
    low, high, shade = _shades(joined, log=log)
    x_axis = linear_axis(
        [first_step - 0.5, first_step + values.shape[1] - 0.5], whole=True, tight=True
    )
    gutter = max(len(label) for _, label in y_ticks)
    labels = "".join(
        f'<span class="y" style="bottom:{100 * at:.2f}%">{escape(label)}</span>'
        for at, label in y_ticks
    )
    steps = [tick for tick in x_axis.ticks if tick >= first_step]
    labels += "".join(
        f'<span class="x" style="left:{100 * x_axis.place(tick):.2f}%">{tick:.0f}</span>'
        for tick in steps
    )
    lines = "".join(
        f'<path class="threshold" d="M0 {100 * (1 - at):.2f}H100"/>'
        for at in thresholds
        if 0 < at < 1
    )
    if lines:
        lines = (
            '<svg viewBox="0 0 100 100" preserveAspectRatio="none" '
            f'aria-hidden="true">{lines}</svg>'
        )
    bar = _image(np.linspace(0, 1, 64)[None], "")
    merged = math.ceil(values.shape[1] / _MAX_COLUMNS)
    note += f"; columns are means of {merged} steps" if merged > 1 else ""
    head = f"<figcaption><b>{escape(title)}</b> <small>{escape(note)}</small></figcaption>"
    lowest, highest = (f"{value:.2g}" for value in (low, high))
    scale = f'<div class="scale">{escape(unit)}: <span>{lowest}{bar}{highest}</span></div>'
    alt = f"{title}: {unit} from {lowest} to {highest}"
    return (
        f'<figure class="chart">{head}{scale}<div class="plot heat" style="--gutter:{gutter}ch">'
        f'{_image(shade, alt)}{lines}{labels}</div><p class="axis">step</p></figure>'
    )


def _joined(values: np.ndarray) -> np.ndarray:
    """At most 240 columns, each the mean of as many steps; steps without a value take no part."""
    size = math.ceil(values.shape[1] / _MAX_COLUMNS)
    parts = [values[:, start : start + size] for start in range(0, values.shape[1], size)]
    known = [np.isfinite(part) for part in parts]
    sums = [np.where(here, part, 0.0).sum(1) for part, here in zip(parts, known, strict=True)]
    counts = [here.sum(1) for here in known]
    means = [
        np.where(n > 0, total / np.maximum(n, 1), math.nan)
        for total, n in zip(sums, counts, strict=True)
    ]
    return np.stack(means, 1)


def _shades(values: np.ndarray, *, log: bool) -> tuple[float, float, np.ndarray]:
    """The lowest and the highest value that colours tell apart, and values between 0 and 1 for
    them.
    """
    known = values[np.isfinite(values) & ((values > 0) if log else True)]
    low, high = (float(known.min()), float(known.max())) if len(known) else (0.0, 0.0)
    if low == high:
        return low, high, np.where(np.isfinite(values), 0.5, math.nan)
    if log:
        filled = np.where(values > 0, values, np.where(np.isfinite(values), low, math.nan))
        return low, high, np.log(filled / low) / math.log(high / low)
    return low, high, (values - low) / (high - low)


def _image(shade: np.ndarray, alt: str) -> str:
    from matplotlib import colormaps

    pixels = (255 * colormaps[_COLORS](np.nan_to_num(shade))).round().astype(np.uint8)
    pixels[..., 3] = np.where(np.isnan(shade), 0, 255)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG", optimize=True)
    return (
        f'<img alt="{escape(alt)}" '
        f'src="data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}">'
    )


def spread_counts(
    counts: Mapping[int, int], edges_of: Callable[[int], tuple[float, float]], limits: np.ndarray
) -> np.ndarray:
    """Shares of a histogram in other bins: a bin's count is spread evenly over its width. What is
    outside is lost.
    """
    total = sum(counts.values())
    found = np.zeros(len(limits) - 1)
    for number, count in counts.items():
        lower, upper = edges_of(number)
        inside = np.clip(limits, lower, upper)
        found += count * np.diff(inside) / (upper - lower)
    return found / total


def extent(
    histograms: Sequence[Mapping[int, int]], edges_of: Callable[[int], tuple[float, float]]
) -> float:
    """The size that 99% of all that was counted stay within."""
    sizes: dict[int, int] = {}
    for number, count in itertools.chain.from_iterable(one.items() for one in histograms):
        sizes[abs(number)] = sizes.get(abs(number), 0) + count
    left = 0.99 * sum(sizes.values())
    for number in sorted(sizes):
        left -= sizes[number]
        if left <= 0:
            return edges_of(number)[1]
    return edges_of(0)[1]
