"""The exact-match reward."""

from __future__ import annotations

import pytest
from support.prompts import sums

from flowgrpo_rc.rewards.exact_match import ExactMatch
from flowgrpo_rc.rewards.manager import (
    RewardConfig,
    requires_target,
)

# --- Exact match


@pytest.mark.parametrize(
    ("options", "values", "contains"),
    [
        ({}, [1, 1, 0, 0, 0], [1, 1, 1, 1, 0]),
        ({"strip": False}, [1, 0, 0, 0, 0], [1, 1, 1, 1, 0]),
        ({"ignore_case": True}, [1, 1, 0, 0, 1], [1, 1, 1, 1, 1]),
    ],
)
def test_exact_match(options, values, contains):
    texts = ["95a", " 95a\n", "95a.", "195a", "95A"]
    scores = ExactMatch(**options)(texts, sums(*["95a"] * 5))
    assert scores.values == values
    assert scores.parts == {"contains": contains}


def test_exact_match_of_nothing_is_a_match_only_for_an_empty_target():
    assert ExactMatch()(["", "1"], sums("1", "1")).values == [0.0, 1.0]
    with pytest.raises(ValueError, match=r"prompt 1 \('1\+1='\) has target=None"):
        ExactMatch()(["1", "1"], sums("1", None))
    assert requires_target(RewardConfig(terms={"exact_match": {}}))


# --- A function


# --- The manager


# --- Kinds
