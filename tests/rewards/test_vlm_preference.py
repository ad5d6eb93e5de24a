"""Win rates within a group, against counts by hand."""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from support.reward_servers import Received, answering, scripted

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.rewards.http.wire import decode_png
from flowgrpo_rc.rewards.manager import RewardConfig, validate_rewards
from flowgrpo_rc.rewards.vlm_preference import VlmPreference, pairs_of

LEVELS = [30, 10, 50, 50, 20]
IMAGES = np.zeros((len(LEVELS), 4, 6, 3), dtype=np.uint8)
IMAGES[:, 0, 0, 0] = LEVELS
PROMPTS = [Prompt(text="a dog", index=3)] * len(LEVELS)


def levels(received: Received) -> list[int]:
    content = received.body["messages"][0]["content"]
    urls = [part["image_url"]["url"] for part in content if part["type"] == "image_url"]
    return [int(decode_png(url.partition(",")[2])[0, 0, 0]) for url in urls]


def fair(received: Received) -> str:
    first, second = levels(received)
    return str((first > second) + 2 * (second > first))


def scores_by(judge, **options: Any):
    def answer(received: Received) -> object:
        return {"choices": [{"message": {"content": judge(received)}}]}

    with scripted(answering(answer)) as server:
        reward = VlmPreference(url=server.url, model="m", deadline_s=60, **options)
        scores = reward(IMAGES, PROMPTS[: len(IMAGES)])
    return scores, [levels(received) for received in server.received]


def share(mine: int, other: int) -> float:
    return 0.5 if mine == other else float(mine > other)


@pytest.mark.parametrize("both_orders", [True, False])
def test_all_pairs(both_orders: bool) -> None:
    scores, asked = scores_by(fair, both_orders=both_orders)
    wanted = [
        np.mean([share(mine, other) for j, other in enumerate(LEVELS) if j != i])
        for i, mine in enumerate(LEVELS)
    ]
    assert scores.values == pytest.approx(wanted)
    assert sum(scores.values) == pytest.approx(len(LEVELS) / 2)
    assert len(asked) == (20 if both_orders else 10)
    assert scores.parts == {"unanswered": [0] * 5, "contradicted": [0] * 5}
    assert scores.failure == ""


def test_a_ring_of_neighbours_costs_less() -> None:
    scores, asked = scores_by(fair, neighbours=1, both_orders=False)
    ring = [(i - 1) % 5 for i in range(5)], [(i + 1) % 5 for i in range(5)]
    wanted = [
        (share(mine, LEVELS[before]) + share(mine, LEVELS[after])) / 2
        for mine, before, after in zip(LEVELS, *ring, strict=True)
    ]
    assert scores.values == pytest.approx(wanted)
    assert len(asked) == 5


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
        return (
            "well"
            if 30 in levels(received)
            else "1.5"
            if 10 in levels(received)
            else fair(received)
        )

    scores, _ = scores_by(shy, attempts=1)
    assert scores.values == pytest.approx([math.nan, math.nan, 0.75, 0.75, 0.0], nan_ok=True)
    assert scores.parts["unanswered"] == pytest.approx([1, 1, 0.5, 0.5, 0.5])
    assert "no number: 'well'" in scores.failure


def test_several_prompts_cannot_be_compared() -> None:
    reward = VlmPreference(url="http://localhost:1", model="m")
    with pytest.raises(ValueError, match="samples of several prompts cannot be compared"):
        reward(IMAGES[:2], [Prompt(text="a", index=0), Prompt(text="a", index=1)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": "a/b", "neighbours": 0}, r"neighbours=0 must be at least 1, or null"),
        ({"path": "a/b", "question": "{low}"}, r"\{low\} is unknown; allowed are \{prompt\}, \{ta"),
        ({"neighbours": 2}, r"which model answers\?"),
    ],
)
def test_wrong_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=rf"reward\.terms\.vlm_preference.*{message}"):
        validate_rewards(RewardConfig(terms={"vlm_preference": options}))
