"""Win rates within a group, against counts by hand."""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from support.reward_servers import Received, answering, chat, scripted, shown

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.rewards.manager import RewardConfig, build_terms
from flowgrpo_rc.rewards.vlm_preference import VlmPreference, pairs_of

LEVELS = [30, 10, 50, 50, 20]
IMAGES = np.zeros((len(LEVELS), 4, 6, 3), dtype=np.uint8)
IMAGES[:, 0, 0, 0] = LEVELS
PROMPTS = [Prompt(text="a dog", index=3)] * len(LEVELS)


def fair(received: Received) -> str:
    first, second = shown(received)
    return str((first > second) + 2 * (second > first))


def scores_by(judge, **options: Any):
    with scripted(answering(lambda received: chat(judge(received)))) as server:
        reward = VlmPreference(url=server.url, model="m", deadline_s=60, **options)
        scores = reward(IMAGES, PROMPTS)
    return scores, [shown(received) for received in server.received]


def share(mine: int, other: int) -> float:
    return 0.5 if mine == other else float(mine > other)


@pytest.mark.parametrize("both_orders", [True, False])
def test_all_pairs(both_orders: bool) -> None:
    scores, questions = scores_by(fair, both_orders=both_orders)
    wanted = [
        np.mean([share(mine, other) for j, other in enumerate(LEVELS) if j != i])
        for i, mine in enumerate(LEVELS)
    ]
    assert scores.values == pytest.approx(wanted)
    assert sum(scores.values) == pytest.approx(len(LEVELS) / 2)
    assert len(questions) == (20 if both_orders else 10)
    assert scores.parts == {"unanswered": [0] * 5, "contradicted": [0] * 5}
    assert scores.failure == ""


def test_a_ring_of_neighbours_costs_less() -> None:
    scores, questions = scores_by(fair, neighbours=1, both_orders=False)
    wanted = [
        (share(mine, LEVELS[i - 1]) + share(mine, LEVELS[(i + 1) % 5])) / 2
        for i, mine in enumerate(LEVELS)
    ]
    assert scores.values == pytest.approx(wanted)
    assert len(questions) == 5


@pytest.mark.parametrize("count", [1, 2, 3, 6, 7])
def test_pairs(count: int) -> None:
    assert sorted(pairs_of(count, None)) == [*combinations(range(count), 2)]
    assert sorted(pairs_of(count, count)) == [*combinations(range(count), 2)]
    for neighbours in range(1, count):
        pairs = pairs_of(count, neighbours)
        met = [sum(i in pair for pair in pairs) for i in range(count)]
        assert len(set(pairs)) == len(pairs)
        assert set(met) == {min(2 * neighbours, count - 1)}


def test_a_judge_that_prefers_a_place_is_found_out() -> None:
    scores, _ = scores_by(lambda received: "1")
    assert scores.values == [0.5] * 5
    assert scores.parts["contradicted"] == [1.0] * 5


def test_comparisons_without_an_answer_do_not_count() -> None:
    def shy(received: Received) -> str:
        said = {30: "well", 10: "1.5"}
        return next((said[level] for level in (30, 10) if level in shown(received)), fair(received))

    scores, _ = scores_by(shy, attempts=1)
    assert scores.values == pytest.approx([math.nan, math.nan, 0.75, 0.75, 0.0], nan_ok=True)
    assert scores.parts["unanswered"] == pytest.approx([1, 1, 0.5, 0.5, 0.5])
    assert "no number: 'well'" in scores.failure


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": "a/b", "neighbours": 0}, r"neighbours=0: give a whole number of at least 1"),
        ({"path": "a/b", "question": "{low}"}, r"question: .*'low': allowed are prompt, target"),
    ],
)
def test_wrong_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=rf"reward\.terms\.vlm_preference.*{message}"):
        build_terms(RewardConfig(terms={"vlm_preference": options}))
