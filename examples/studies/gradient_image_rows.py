"""The table of docs/gradient_study.md about the bundled Stable Diffusion 3."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean

from gradient_region_rows import SWEPT, Value
from gradient_rows import Cells
from tables import markdown

ROLLOUTS = {
    "bf16": "bf16",
    "int4": "int4",
    "bits2": "2 bits",
    "stale_8": "8 old",
    "cached": "cached",
}
EXACT = "bypass_plain_none"
CENTERED = ("bypass_centered_none", "decoupled_centered_none", "guard_bypass_plain_none")


def slopes(cells: Cells, rollout: str, estimator: str, reach: str = "slopes") -> list[float]:
    """Returns the slope of the reward along an estimator's direction, for each block.

    Args:
      cells: the cells of the study.
      rollout: name of the rollout.
      estimator: name of the estimator.
      reach: `slopes` for the short move, `further` for the long one.
    """
    found: list[float] = cells[f"image_{rollout}"][reach][estimator]
    return found


def relative(cells: Cells, rollout: str, estimator: str, reach: str = "slopes") -> Value:
    """Returns the mean slope over that of the exact rollout, and its error by the jackknife.

    Guard is compared with Guard. Arguments as in `slopes`.
    """
    base = estimator if estimator.startswith("guard") else EXACT
    return ratio(slopes(cells, rollout, estimator, reach), slopes(cells, "exact", base, reach))


def ratio(values: Sequence[float], references: Sequence[float]) -> Value:
    """Returns sum(values) / sum(references) and its standard error, leaving out each pair once."""
    pairs = list(zip(values, references, strict=True))
    left_out = []
    for index in range(len(pairs)):
        kept = pairs[:index] + pairs[index + 1 :]
        left_out.append(sum(a for a, _ in kept) / sum(b for _, b in kept))
    centre = fmean(left_out)
    count = len(pairs)
    error = (sum((one - centre) ** 2 for one in left_out) * (count - 1) / count) ** 0.5
    return Value(sum(values) / sum(references), error)


def absolute(cells: Cells, estimator: str) -> Value:
    """Returns the mean slope of the exact rollout and its standard error."""
    values = slopes(cells, "exact", estimator)
    return ratio(values, [1.0] * len(values))


def gain(cells: Cells, rollout: str, reach: str = "slopes") -> Value:
    """Returns what centering adds in bypass mode, over the mean slope of the exact rollout.

    The difference is taken block by block. Arguments as in `slopes`.
    """
    plain = slopes(cells, rollout, EXACT, reach)
    centered = slopes(cells, rollout, CENTERED[0], reach)
    differences = [b - a for a, b in zip(plain, centered, strict=True)]
    return ratio(differences, slopes(cells, "exact", EXACT, reach))


def table(reach: str, cells: Cells) -> str:
    """Makes the table of relative slopes; `reach` as in `slopes`."""
    rows = [
        [text, *(relative(cells, rollout, name, reach).text for rollout in ROLLOUTS)]
        for name, text in SWEPT.items()
    ]
    rows.append(["centered minus plain, bypass", *(gain(cells, m, reach).text for m in ROLLOUTS)])
    return markdown(["slope over that of exact rollouts", *ROLLOUTS.values()], rows)


def moves(cells: Cells) -> str:
    """Formats the two lengths of the moves."""
    short, long = cells["image_exact"]["steps"]
    return f"{short:g} and {long:g}"


def cached_cosine(cells: Cells, estimator: str) -> str:
    """Formats the cosine of gradients on cached rollouts with those on exact ones, over blocks."""
    return mean(cells["image_cached"]["cosines"][estimator])


def mean(values: Sequence[float]) -> str:
    """Formats a mean and its standard error."""
    return ratio(values, [1.0] * len(values)).text


ENTRIES: dict[str, Callable[[Cells], str]] = {
    "gradient_image": lambda cells: table("slopes", cells),
    "gradient_image_exact": lambda cells: absolute(cells, EXACT).text,
    "gradient_image_moves": moves,
    "gradient_image_int4_gain": lambda cells: gain(cells, "int4").text,
    "gradient_image_bits2_gain": lambda cells: gain(cells, "bits2").text,
    "gradient_image_cached_cosine": lambda cells: cached_cosine(cells, CENTERED[0]),
    "gradient_image_cached_plain": lambda cells: cached_cosine(cells, EXACT),
    "gradient_selection_extremes": lambda cells: mean(cells["image_selection"]["extremes"]),
    "gradient_selection_half": lambda cells: mean(cells["image_selection"]["half"]),
    "gradient_image_stale_8_gain": lambda cells: gain(cells, "stale_8").text,
}
CLAIMS: dict[str, Callable[[Cells], bool]] = {
    "gradient_image_all_rise": lambda c: all(
        one.value > 2 * one.error
        for one in (relative(c, rollout, name) for rollout in ROLLOUTS for name in SWEPT)
    ),
    "gradient_image_bf16_is_exact": lambda c: all(
        abs(relative(c, "bf16", name).value - 1) < 0.01 for name in SWEPT
    ),
    "gradient_image_plain_loses": lambda c: all(
        gain(c, rollout).value > 2 * gain(c, rollout).error for rollout in ("int4", "bits2")
    ),
    "gradient_image_centered_keeps": lambda c: all(
        relative(c, rollout, name).value + 2 * relative(c, rollout, name).error > 1
        and relative(c, rollout, name).value > 0.99
        for rollout in ROLLOUTS
        for name in CENTERED
    ),
    "gradient_image_old_is_faster": lambda c: (
        gain(c, "stale_8").value < -2 * gain(c, "stale_8").error
        and relative(c, "stale_8", EXACT).value > 1
    ),
}
