"""The grammar of thresholds: bands of rejection criteria, bounds of importance weights."""

import math
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

from flowgrpo_rc.plugins import check_choice, check_that, did_you_mean

KEY = "algorithm.rollout_correction"
RS_KEY = f"{KEY}.rollout_rs"
THRESHOLD_KEY = f"{KEY}.rollout_rs_threshold"
LOWER_KEY = f"{KEY}.rollout_rs_threshold_lower"
IS_KEY = f"{KEY}.rollout_is_threshold"
MODE_KEY = f"{KEY}.rollout_is_mode"
LEVELS = ("token", "seq_sum", "seq_mean", "seq_max")
ESTIMATORS = ("k1", "k2", "k3")
CRITERIA = tuple(
    "_".join(pair) for pair in product(LEVELS, ESTIMATORS) if pair != ("seq_max", "k1")
)
STEP_KL = "step_kl"  # the one criterion that is not a function of log-ratios
OLDER_NAMES = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}
IS_MODES = ("truncate", "clip", "mask", "icepop")
_UNQUOTED = 'an unquoted 0.5_2 is read as the number 0.52: quote the pair, "0.5_2.0"'


class Band(NamedTuple):
    """One criterion: it keeps what has lower <= statistic <= upper.

    k1 is -log(ratio), so its bounds are the negated logarithms of those of the ratio; the other
    estimators have -inf for the lower one.
    """

    level: str  # token (a step), seq_sum, seq_mean, seq_max; or step for the exact KL
    estimator: str  # k1, k2 or k3 of `core.kl`, or kl for the exact KL of a step
    lower: float
    upper: float
    auto: bool = False  # whether bounds are robust deviations from a running median: `AutoBands`

    @property
    def name(self) -> str:
        """The criterion's name, such as seq_mean_k1."""
        return f"{self.level}_{self.estimator}"

    @property
    def per_step(self) -> bool:
        """Whether it judges steps, and not sequences."""
        return self.level in ("token", "step")


class WeightBounds(NamedTuple):
    """Says what happens to an importance weight outside its bounds."""

    mode: str  # one of `IS_MODES`; `weights.bound` says what they do
    lower: float  # 0 for none
    upper: float


def parse_bands(
    criteria: object,
    thresholds: object,
    thresholds_lower: object = None,
    *,
    fallback: object = None,
) -> tuple[Band, ...]:
    """Parses criteria and their thresholds as a user writes them: a band for each criterion.

    Args:
      criteria: names of criteria, a list or a string with commas; None for none.
      thresholds: one threshold for all criteria or one for each; numbers or strings.
      thresholds_lower: lower bounds of the k1 criteria whose threshold is the upper bound alone.
      fallback: threshold of the older names (`OLDER_NAMES`) if `thresholds` is null.

    Raises:
      ValueError: for an unknown criterion (naming the nearest), a missing or malformed threshold, a
        reversed band, and a number of thresholds that is neither 1 nor that of the criteria.
    """
    written = [str(item).strip() for item in _listed(criteria)]
    if not written:
        for key, value in ((THRESHOLD_KEY, thresholds), (LOWER_KEY, thresholds_lower)):
            message = f"{key}={value!r} has no effect without {RS_KEY}: set it or drop this"
            check_that(not _listed(value), message)
        return ()
    names = [OLDER_NAMES.get(name, name) for name in written]
    known = (*CRITERIA, STEP_KL)
    for name in names:
        hint = "" if name in known else did_you_mean(name, known)
        allowed = ", ".join((*known, *OLDER_NAMES))
        check_that(name in known, f"{RS_KEY}={name!r}{hint}: allowed are {allowed}")
    joined = ",".join(written)
    check_that(len(set(names)) == len(names), f"{RS_KEY}={joined!r} names a criterion twice")
    if not _listed(thresholds) and all(name in OLDER_NAMES for name in written):
        thresholds = fallback
    message = f'{RS_KEY}={joined} needs {THRESHOLD_KEY}, for instance "0.5_2.0"'
    check_that(bool(_listed(thresholds)), message)
    uppers = _one_each(thresholds, len(names), THRESHOLD_KEY)
    lowers = _one_each(thresholds_lower, len(names), LOWER_KEY)
    return tuple(map(_band, names, uppers, lowers))


def parse_weight_bounds(threshold: object, mode: str | None) -> WeightBounds:
    """Parses the bounds of the importance weights as a user writes them.

    Args:
      threshold: the upper bound, whose reciprocal is the lower one if the mode has one, or
        "lower_upper".
      mode: one of `IS_MODES`; None means truncate for one number and icepop for two, as in verl.

    Returns:
      The bounds.

    Raises:
      ValueError: for an unknown mode, a malformed threshold, and a lower bound that the mode does
        not use.
    """
    check_choice(MODE_KEY, mode, (None, *IS_MODES))
    numbers = _numbers(threshold, IS_KEY)
    if len(numbers) == 1:
        (upper,) = numbers
        check_that(
            1 <= upper < math.inf,
            f"{IS_KEY}={threshold!r}: one number is the upper bound and must be 1 or more (a lower "
            f"one would shrink the weights of samples that need no correction); {_UNQUOTED}",
        )
        lower = 0.0 if mode in (None, "truncate") else 1 / upper
        return WeightBounds(mode or "truncate", lower, upper)
    lower, upper = numbers
    ordered = 0 <= lower < upper < math.inf
    check_that(ordered, f"{IS_KEY}={threshold!r}: a pair needs 0 <= lower < upper")
    check_that(
        mode != "truncate",
        f"{IS_KEY}={threshold!r} has a lower bound, which {MODE_KEY}=truncate does not use: give "
        "one number, or another mode",
    )
    return WeightBounds(mode or "icepop", lower, upper)


def _listed(value: object) -> list[object]:
    """Makes a list of None, a scalar, a string with commas or a sequence."""
    if value is None:
        return []
    if isinstance(value, str):
        return [entry for entry in value.split(",") if entry.strip()]
    return list(value) if isinstance(value, Sequence) else [value]


def _one_each(value: object, count: int, key: str) -> list[object]:
    specs = _listed(value) or [None]
    check_that(
        len(specs) in (1, count),
        f"{key} has {len(specs)} entries for {count} criteria: give one for all or one for each",
    )
    return specs * count if len(specs) == 1 else specs


def _band(name: str, spec: object, lower_spec: object) -> Band:
    level, estimator = name.rsplit("_", 1)
    # k1 has a sign, and so two sides; the others are sizes.
    has_lower = estimator == "k1"
    auto = str(spec).strip().startswith("auto")
    check_that(
        lower_spec is None or (has_lower and not auto),
        f"{LOWER_KEY}={lower_spec!r} has no effect on {name} with {THRESHOLD_KEY}={spec}: drop it",
    )
    if auto:
        deviations = parse_deviations(spec)
        if deviations is None:
            raise ValueError(
                f"{THRESHOLD_KEY}={spec!r}: give the standard deviations above 0 after the colon, "
                '"auto:4"'
            )
        lower = -deviations if has_lower else -math.inf
        return Band(level, estimator, lower, deviations, auto=True)
    if not has_lower:
        numbers = _numbers(spec, THRESHOLD_KEY)
        message = f"{THRESHOLD_KEY}={spec!r} for {name}: give one upper bound above 0"
        check_that(len(numbers) == 1 and 0 < numbers[0] < math.inf, message)
        return Band(level, estimator, -math.inf, numbers[0])
    lower, upper = _ratios(name, spec, lower_spec)
    # On -log(ratio) the bounds change signs and places; a lower bound of 0 leaves a side open.
    return Band(level, estimator, -math.log(upper), -math.log(lower) if lower else math.inf)


def _ratios(name: str, spec: object, lower_spec: object) -> list[float]:
    """Parses the bounds of a ratio, which may be in one key or in two."""
    numbers = _numbers(spec, THRESHOLD_KEY)
    beside = ""
    if lower_spec is not None:
        beside = f" with {LOWER_KEY}={lower_spec!r}"
        lowest = _numbers(lower_spec, LOWER_KEY)
        check_that(
            len(numbers) == len(lowest) == 1,
            f"{THRESHOLD_KEY}={spec!r}{beside} for {name}: give one number each, or drop the "
            "second; a pair and it both give a lower bound",
        )
        numbers = [*lowest, *numbers]
    elif len(numbers) == 1:
        (upper,) = numbers
        check_that(
            1 < upper < math.inf,
            f"{THRESHOLD_KEY}={spec!r} for {name}: a single number is the upper bound u of the "
            f"band 1/u to u and must exceed 1; {_UNQUOTED}",
        )
        numbers = [1 / upper, upper]
    check_that(
        0 <= numbers[0] < numbers[1] < math.inf,
        f"{THRESHOLD_KEY}={spec!r}{beside} for {name}: a band needs 0 <= lower < upper",
    )
    return numbers


def parse_deviations(spec: object) -> float | None:
    """Parses the k of "auto:k", a number above 0; None for anything else."""
    word, _, number = str(spec).strip().partition(":")
    try:
        deviations = float(number)
    except ValueError:
        return None
    # float reads "1_2" as 12; here an underscore separates two numbers.
    is_number = word == "auto" and "_" not in number and 0 < deviations < math.inf
    return deviations if is_number else None


def _numbers(spec: object, key: str) -> list[float]:
    """Parses one number, or a pair "lower_upper"."""
    try:
        numbers = [float(number) for number in str(spec).strip().split("_")]
    except ValueError:
        numbers = []
    known = len(numbers) in (1, 2) and not any(map(math.isnan, numbers))
    check_that(
        known and not isinstance(spec, bool),
        f'{key}={spec!r}: write one number, or a pair "lower_upper", for instance "0.5_2.0"',
    )
    return numbers
