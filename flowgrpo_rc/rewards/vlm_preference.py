"""A reward that compares the samples of a prompt in pairs: how many of the others a sample beats.

Reference: a win rate within the group as the reward is that of "Pref-GRPO",
https://arxiv.org/abs/2508.20751.
"""

import math
from collections.abc import Sequence

import numpy as np

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.rewards.base import Scores, check_range
from flowgrpo_rc.rewards.vlm.judge import AsksVlm, Judge, failure_of
from flowgrpo_rc.rewards.vlm.models import Question

QUESTION = (
    'Both images were made for the prompt "{prompt}". Which one shows what the prompt says better, '
    "and looks better? Answer with 1 for the first, 2 for the second or 0 if they are equally "
    "good, and with nothing else."
)
NAMES = ("prompt", "target")  # that may stand in a question, in braces
# The share of a win that the first image of a pair gets, by the judge's answer.
OUTCOMES = {0.0: 0.5, 1.0: 1.0, 2.0: 0.0}


class VlmPreference(AsksVlm):
    """The share of its comparisons that a sample wins, from 0 to 1; half of one where it ties.

    A comparison without an answer that can be read does not count, and a sample without any that
    counts has no score. The part `unanswered` is the share of a sample's comparisons that do not
    count; `contradicted` that of its pairs of which each order has another winner.

    Args:
      question: what is asked of two images, with {prompt} and {target} where they should stand. 1
        means the first image, 2 the second, and 0 neither.
      parse: where in an answer the number is: `number` (the last one), `regex:PATTERN` (its group)
        or `json:KEY`.
      attempts: how often a question is asked at most, if its answer cannot be read.
      neighbours: each sample is compared with so many that follow it, as if the group were a ring:
        neighbours x n pairs of n samples. null: all n (n - 1) / 2 pairs.
      both_orders: ask about each pair twice, with either image first, since many models prefer a
        place.
      vlm: `url`, `model` and the other options of `VlmServer`, or `path` and those of `LocalVlm`.
    """

    groupwise = True
    part_names = ("unanswered", "contradicted")

    def __init__(
        self,
        *,
        question: str = QUESTION,
        parse: str = "number",
        attempts: int = 2,
        neighbours: int | None = None,
        both_orders: bool = True,
        **vlm: object,
    ) -> None:
        if neighbours is not None:
            check_range(1, neighbours=neighbours)
        self.requires_target = "{target}" in question
        self._neighbours = neighbours
        self._both_orders = both_orders
        super().__init__(vlm)
        self._judge = Judge(
            self._vlm, question, NAMES, parse=parse, low=0, high=2, attempts=attempts
        )

    def __call__(self, samples: np.ndarray, prompts: Sequence[Prompt]) -> Scores:
        text = self._judge.text(prompts[0])
        pairs = pairs_of(len(samples), self._neighbours)
        ordered_pairs = [*pairs, *[(j, i) for i, j in pairs]] if self._both_orders else pairs
        verdicts = self._judge.ask(
            [Question(pictures=[samples[i], samples[j]], text=text) for i, j in ordered_pairs]
        )
        # The first image's share of a win; NaN for an answer that is none of the three.
        shares = np.array([OUTCOMES.get(verdict.number, math.nan) for verdict in verdicts])
        count = len(samples)
        answered = ~np.isnan(shares)
        wins = _mean_of_each(count, ordered_pairs, np.stack([shares, 1 - shares]))
        contradicted = np.zeros(len(pairs))
        if self._both_orders:
            forth, back = np.split(shares, 2)
            contradicted = ~np.isclose(forth, 1 - back) & answered.reshape(2, -1).all(0)
        columns = {
            "unanswered": 1 - np.nan_to_num(_mean_of_each(count, ordered_pairs, answered)),
            "contradicted": np.nan_to_num(_mean_of_each(count, pairs, contradicted)),
        }
        return Scores(
            values=wins.tolist(),
            parts={name: values.tolist() for name, values in columns.items()},
            failure=failure_of(verdicts),
        )


def pairs_of(count: int, neighbours: int | None) -> list[tuple[int, int]]:
    """Returns the pairs of a group that are compared; no pair twice. See `neighbours` above."""
    steps = range(1, count) if neighbours is None else range(1, min(neighbours, count - 1) + 1)
    ring = [(first, (first + step) % count) for step in steps for first in range(count)]
    # The second half of a ring meets the first again.
    return list(dict.fromkeys((min(pair), max(pair)) for pair in ring))


def _mean_of_each(count: int, pairs: Sequence[tuple[int, int]], values: np.ndarray) -> np.ndarray:
    """Returns what each sample has on average in its pairs, [M], or as first and second, [2, M]."""
    both = np.broadcast_to(values, (2, len(pairs))).astype(float)
    counted = ~np.isnan(both)
    places = np.array(pairs, dtype=int).reshape(-1, 2).T[counted]
    sums = np.bincount(places, both[counted], minlength=count)
    numbers = np.bincount(places, minlength=count)
    return np.where(numbers > 0, sums / np.maximum(numbers, 1), math.nan)
