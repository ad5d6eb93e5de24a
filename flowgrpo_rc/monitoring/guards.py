"""Notices a reward that is gamed: it rises, and another measure of the samples falls.

A guard is whatever reports its change since the start with a confidence interval: `GUARD/change`,
`GUARD/change_low` and `GUARD/change_high`. Suites do (`evaluation/suite_runner.py`).
"""

import math
from collections.abc import Iterator, Mapping
from statistics import fmean, variance
from typing import Any

from flowgrpo_rc.evaluation.intervals import t_quantile

REWARD = "reward/mean"
_CHANGE = "/change"
_STEPS = 5  # that a mean of the reward is taken over, at each end of the run
_LEAST = 2  # steps at each end, of a run that is shorter
_LEVEL = 0.9  # two-sided, so that a level reward counts as risen in 5% of the cases


class Guards:
    """Compares the first steps' rewards with the last ones, and asks the guards of a step."""

    def __init__(self) -> None:
        self._first: list[float] = []
        self._last: list[float] = []
        self._count = 0

    def judge(self, metrics: Mapping[str, float | None]) -> Iterator[tuple[str, str]]:
        """Takes in a step's reward, and yields the name of each guard of the step and a sentence.

        It is "" unless the guard has fallen beyond its interval while the reward has risen beyond
        its noise.
        """
        reward = metrics.get(REWARD)
        if reward is not None and math.isfinite(reward):
            self._count += 1
            if len(self._first) < _STEPS:
                self._first.append(reward)
            self._last = [*self._last, reward][-_STEPS:]
        gain = self._gain()
        for name in sorted(metrics):
            if not name.endswith(f"{_CHANGE}_high"):
                continue
            change = name.removesuffix("_high")
            mean, low, high = (metrics.get(key) for key in (change, f"{change}_low", name))
            if mean is None or low is None or high is None:
                continue
            if math.isfinite(mean + low + high):
                yield change.removesuffix(_CHANGE), _sentence(change, mean, low, high, gain)

    def state_dict(self) -> dict[str, object]:
        """Returns the state; JSON can hold it."""
        return {"first": self._first, "last": self._last, "count": self._count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes back to what `state_dict` returned."""
        self._first = [float(value) for value in state["first"]]
        self._last = [float(value) for value in state["last"]]
        self._count = int(state["count"])

    def _gain(self) -> float | None:
        """Returns by how much the reward has risen; None if that may be noise.

        The two means are compared by Student's t test at 5%, one-sided.
        """
        size = min(_STEPS, self._count // 2)
        if size < _LEAST:
            return None
        first = self._first[:size]
        last = self._last[-size:]
        gain = fmean(last) - fmean(first)
        error = math.sqrt((variance(first) + variance(last)) / size)
        return gain if gain > t_quantile(2 * size - 2, _LEVEL) * error else None


def _sentence(change: str, mean: float, low: float, high: float, gain: float | None) -> str:
    if gain is None or high >= 0:
        return ""
    return (
        f"{change} is {mean:.4g} (95% interval {low:.4g} to {high:.4g}), while {REWARD} has risen "
        f"by {gain:.4g}: the reward may be gained at the expense of what the suite measures. Look "
        "at the samples; if they have become worse, add what was lost to reward.terms, set "
        "actor.use_kl_loss=true, or take an earlier checkpoint."
    )
