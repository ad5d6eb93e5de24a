"""A heat map over training steps: a small PNG inside the page, stretched, with HTML labels."""

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
from flowgrpo_rc.report.charts import shown

_MAX_COLUMNS = 240
_COLORS = "viridis"


def columns_by_step(found: Mapping[int, np.ndarray]) -> np.ndarray:
    """Returns values by row and step, [rows, steps], from the first to the last step.

    Args:
      found: step -> values, [rows]. Steps that are missing become nan.
    """
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
    """Draws a heat map with a title; nan stays empty.

    More than 240 steps are averaged in columns.

    Args:
      title: heading of the map.
      values: [rows, steps], the first row at the top.
      first_step: the step of the first column.
      y_ticks: height, from 0 (bottom) to 1, and label.
      note: small text behind the title.
      unit: what the colour stands for.
      log: colours by the logarithm; zeros have the lowest colour.
      thresholds: heights of dashed lines, from 0 (bottom) to 1.
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
    bar = _image(np.linspace(0, 1, 64)[None], "")
    merged = math.ceil(values.shape[1] / _MAX_COLUMNS)
    note += f"; columns are means of {merged} steps" if merged > 1 else ""
    head = f"<figcaption><b>{escape(title)}</b><p><small>{escape(note)}</small></p></figcaption>"
    lowest = shown(float(f"{low:.2g}"))
    highest = shown(float(f"{high:.2g}"))
    scale = f'<div class="scale">{escape(unit)}: <span>{lowest}{bar}{highest}</span></div>'
    alt = f"{title}: {unit} from {lowest} to {highest}"
    return (
        f'<figure class="chart">{head}{scale}<div class="heat-plot" style="--gutter:{gutter}ch">'
        f'{_image(shade, alt)}{_dashed(thresholds)}{labels}</div><p class="axis">step</p></figure>'
    )


def _dashed(thresholds: Sequence[float]) -> str:
    """Draws dashed lines at heights from 0 (bottom) to 1; others are left out."""
    lines = "".join(f'<path d="M0 {100 * (1 - at):.2f}H100"/>' for at in thresholds if 0 < at < 1)
    if not lines:
        return ""
    return f'<svg viewBox="0 0 100 100" preserveAspectRatio="none" aria-hidden="true">{lines}</svg>'


def _joined(values: np.ndarray) -> np.ndarray:
    """Averages columns [rows, steps] until at most 240 are left; missing values take no part."""
    size = math.ceil(values.shape[1] / _MAX_COLUMNS)
    means = []
    for start in range(0, values.shape[1], size):
        joined = values[:, start : start + size]
        known = np.isfinite(joined)
        total = np.where(known, joined, 0.0).sum(1)
        count = known.sum(1)
        means.append(np.where(count > 0, total / np.maximum(count, 1), math.nan))
    return np.stack(means, 1)


def _shades(values: np.ndarray, *, log: bool) -> tuple[float, float, np.ndarray]:
    """Returns the range of values that colours tell apart, and each value's place in it (0..1)."""
    known = values[np.isfinite(values) & ((values > 0) if log else True)]
    low = float(known.min()) if len(known) else 0.0
    high = float(known.max()) if len(known) else 0.0
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
    """Returns the shares of a histogram in other bins; what lies outside is lost.

    The count of a bin is spread evenly over its width.

    Args:
      counts: number of a bin -> count.
      edges_of: returns the edges of a bin.
      limits: edges of the new bins, ascending.
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
    """Returns the size that 99% of all counted values stay within.

    Args:
      histograms: number of a bin -> count, one mapping for each step.
      edges_of: returns the edges of a bin.
    """
    sizes: dict[int, int] = {}
    for number, count in itertools.chain.from_iterable(one.items() for one in histograms):
        sizes[abs(number)] = sizes.get(abs(number), 0) + count
    left = 0.99 * sum(sizes.values())
    for number in sorted(sizes):
        left -= sizes[number]
        if left <= 0:
            return edges_of(number)[1]
    return edges_of(0)[1]
