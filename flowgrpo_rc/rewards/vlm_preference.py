"""A reward that compares the samples of a prompt in pairs: how many of the others a sample beats.

Reference: a win rate within the group as the reward is that of "Pref-GRPO",
https://arxiv.org/abs/2508.20751.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.rewards.base import Scores
from flowgrpo_rc.rewards.vlm.base import Question
from flowgrpo_rc.rewards.vlm.judge import AsksVlm, Judge, check_template, failure_of, filled

QUESTION = (
    'Both images were made for the prompt "{prompt}". Which one shows what the prompt says better, '
    "and looks better? Answer with 1 for the first, 2 for the second or 0 if they are equally "
    "good, and with nothing else."
)
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
        **vlm: Any,
    ) -> None:
        check_template(question, ("prompt", "target"))
        if neighbours is not None and neighbours < 1:
            raise ValueError(f"neighbours={neighbours!r} must be at least 1, or null for all pairs")
        self.requires_target = "{target}" in question
        self._question = question
        self._neighbours = neighbours
        self._both_orders = both_orders
        super().__init__(vlm)
        self._judge = Judge(self._vlm, parse=parse, low=0, high=2, attempts=attempts)

    def __call__(self, samples: np.ndarray, prompts: Sequence[Prompt]) -> Scores:
        if len({prompt.index for prompt in prompts}) != 1:
            raise ValueError("samples of several prompts cannot be compared; give one group")
        values = {"prompt": prompts[0].text, "target": prompts[0].target or ""}
        text = filled(self._question, values)
        pairs = pairs_of(len(samples), self._neighbours)
        asked = [*pairs, *[(j, i) for i, j in pairs]] if self._both_orders else pairs
        verdicts = self._judge.ask(
            [Question(pictures=[samples[i], samples[j]], text=text) for i, j in asked]
        )
        # The first image's share of a win; NaN for an answer that is none of the three.
        shares = np.array([OUTCOMES.get(verdict.number, math.nan) for verdict in verdicts])
        wins, unanswered = _win_rates(len(samples), asked, shares)
        contradicted = np.zeros(len(samples))
        if self._both_orders:
            contradicted = _contradicted(len(samples), pairs, shares)
        return Scores(
            values=wins.tolist(),
            parts={"unanswered": unanswered.tolist(), "contradicted": contradicted.tolist()},
            failure=failure_of(verdicts),
        )


def pairs_of(count: int, neighbours: int | None) -> list[tuple[int, int]]:
    """Returns the pairs of a group that are compared; no pair twice. See `neighbours` above."""
    steps = range(1, count) if neighbours is None else range(1, min(neighbours, count - 1) + 1)
    ring = [(first, (first + step) % count) for step in steps for first in range(count)]
    # The second half of a ring meets the first again.
    return list(dict.fromkeys((min(pair), max(pair)) for pair in ring))


def _win_rates(
    count: int, asked: Sequence[tuple[int, int]], shares: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns each sample's mean share of a win, and the share of its comparisons without one."""
    wins, counted, compared = np.zeros(count), np.zeros(count), np.zeros(count)
    for (first, second), share in zip(asked, shares, strict=True):
        compared[[first, second]] += 1
        if not math.isnan(share):
            counted[[first, second]] += 1
            wins[first] += share
            wins[second] += 1 - share
    rates = np.where(counted > 0, wins / np.maximum(counted, 1), math.nan)
    return rates, 1 - counted / np.maximum(compared, 1)


def _contradicted(count: int, pairs: Sequence[tuple[int, int]], shares: np.ndarray) -> np.ndarray:
    """Returns the share of each sample's pairs whose two orders have different outcomes.

    `shares` are those of the M pairs and then of the M reversed pairs.
    """
    forth, back = np.split(shares, 2)
    differ = ~np.isclose(forth, 1 - back) & ~np.isnan(forth) & ~np.isnan(back)
    found, compared = np.zeros(count), np.zeros(count)
    for pair, differs in zip(pairs, differ, strict=True):
        compared[list(pair)] += 1
        found[list(pair)] += differs
    return found / np.maximum(compared, 1)
