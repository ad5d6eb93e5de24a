"""The grammar of rejection criteria and their thresholds."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

RS_KEY = "algorithm.rollout_correction.rollout_rs"
THRESHOLD_KEY = "algorithm.rollout_correction.rollout_rs_threshold"
LEVELS = ("token", "seq_sum", "seq_mean", "seq_max")
CRITERIA = tuple(
    f"{level}_{k}" for level in LEVELS for k in ("k1", "k2", "k3") if (level, k) != ("seq_max", "k1")
)


class Band(NamedTuple):
    """One criterion: keep where lower <= statistic <= upper.

    level: token (a step), seq_sum, seq_mean or seq_max over the valid steps; estimator: k1, k2 or k3.
    For k1 the statistic is the log-ratio and the bounds are logarithms of the ratio's; k2 and k3 have only an
    upper bound.
    """

    level: str
    estimator: str
    lower: float
    upper: float

    @property
    def name(self) -> str:
        return f"{self.level}_{self.estimator}"


def parse_bands(criteria: Any, thresholds: Any) -> tuple[Band, ...]:
    """Criteria and thresholds as a user writes them (strings with commas, lists, numbers) -> bands.

    Raises ValueError for an unknown criterion (naming the nearest), a missing or malformed threshold, a reversed
    band, and a number of thresholds that is neither 1 nor that of the criteria.
    """
    names = [str(item).strip() for item in _listed(criteria)]
    specs = _listed(thresholds)
    if not names:
        if specs:
            raise ValueError(f"{THRESHOLD_KEY}={thresholds!r} has no effect without {RS_KEY}: set it or drop this")
        return ()
    for name in names:
        if name not in CRITERIA:
            near = difflib.get_close_matches(name, CRITERIA, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise ValueError(f"{RS_KEY}={name!r}{hint}: allowed are {', '.join(CRITERIA)}")
    if len(set(names)) != len(names):
        raise ValueError(f"{RS_KEY}={','.join(names)!r} names a criterion twice")
    if not specs:
        raise ValueError(f'{RS_KEY}={",".join(names)} needs {THRESHOLD_KEY}, for instance "0.5_2.0"')
    if len(specs) not in (1, len(names)):
        raise ValueError(
            f"{THRESHOLD_KEY} has {len(specs)} entries for {len(names)} criteria: give one for all or one for each"
        )
    specs = specs * len(names) if len(specs) == 1 else specs
    return tuple(_band(name, spec) for name, spec in zip(names, specs, strict=True))


def _listed(value: Any) -> list[Any]:
    """None, a scalar, a string with commas or a sequence -> a list."""
    if value is None:
        return []
    if isinstance(value, str):
        return [part for part in value.split(",") if part.strip()]
    return list(value) if isinstance(value, Sequence) else [value]


def _band(name: str, spec: Any) -> Band:
    level, estimator = name.rsplit("_", 1)
    numbers = [_number(part, spec) for part in str(spec).strip().split("_")]
    if estimator != "k1":
        if len(numbers) != 1 or not 0 < numbers[0] < math.inf:
            raise ValueError(f"{THRESHOLD_KEY}={spec!r} for {name}: give one upper bound above 0")
        return Band(level, estimator, -math.inf, numbers[0])
    if len(numbers) == 1:
        upper = numbers[0]
        if not 1 < upper < math.inf:
            raise ValueError(
                f"{THRESHOLD_KEY}={spec!r} for {name}: a single number is the upper bound u of the band 1/u to u "
                'and must exceed 1. An unquoted 0.5_2 is read as the number 0.52: quote the band, "0.5_2.0"'
            )
        return Band(level, estimator, -math.log(upper), math.log(upper))
    if len(numbers) != 2:
        raise ValueError(f'{THRESHOLD_KEY}={spec!r} for {name}: write a band as "lower_upper", for instance "0.5_2.0"')
    lower, upper = numbers
    if not 0 <= lower < upper < math.inf:
        raise ValueError(f"{THRESHOLD_KEY}={spec!r} for {name}: a band needs 0 <= lower < upper")
    return Band(level, estimator, math.log(lower) if lower else -math.inf, math.log(upper))


def _number(text: str, spec: Any) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f'{THRESHOLD_KEY}={spec!r} is no number and no band such as "0.5_2.0"') from None
