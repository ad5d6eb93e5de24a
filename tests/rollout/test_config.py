"""The settings of a rollout: sliding windows, their tail, and evaluation."""

from __future__ import annotations

from typing import Any

import pytest

from flowgrpo_rc.rollout.config import (
    SAMPLED,
    AlgoConfig,
    EvaluationConfig,
    PipelineConfig,
    RolloutConfig,
)


def config(**algo: Any) -> RolloutConfig:
    """Ten steps, of which a window of 2 lies in the first 5."""
    settings = {"sde_window_size": 2, "sde_window_range": [0, 5]} | algo
    return RolloutConfig(algo=AlgoConfig(**settings))


def test_a_window_that_is_drawn_has_the_whole_range_in_every_step() -> None:
    drawn = config(tail_steps=2)
    assert {drawn.window_at(step) for step in range(1, 30)} == {drawn.window()} == {(2, 0, 5)}
    assert {drawn.spec(step).tail_start for step in range(1, 30)} == {5}
    assert drawn.evaluations() == 7


def test_a_sliding_window_takes_its_tail_along() -> None:
    sliding = config(sde_window_interval=2, tail_steps=3)
    assert [sliding.window_at(step) for step in (1, 2, 3, 5, 7, 9)] == [
        (2, 0, 2),
        (2, 0, 2),
        (2, 1, 3),
        (2, 2, 4),
        (2, 3, 5),
        (2, 0, 2),
    ]
    assert [sliding.spec(step).tail_start for step in (1, 3, 5, 7)] == [2, 3, 4, 5]
    assert [sliding.evaluations(step) for step in (1, 3, 5, 7)] == [5, 6, 7, 8]
    assert config(sde_window_interval=2).spec(3).tail_start is None


@pytest.mark.parametrize(
    ("algo", "words"),
    [
        ({"sde_window_interval": 0}, "sde_window_interval=0: give at least 1"),
        ({"sde_window_interval": 1, "window_sharing": "sample"}, "sharing=sample .* sliding"),
        (
            {"sde_window_interval": 5, "sde_window_size": 5},
            r"interval=5 .* window of 5 steps .* rollout\.algo\.sde_window_range=\[0, 5\]",
        ),
    ],
)
def test_a_sliding_window_that_cannot_slide_is_refused(algo: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        config(**algo).validate()


@pytest.mark.parametrize("key", SAMPLED)
def test_evaluation_samples_as_training_unless_it_has_its_own(key: str) -> None:
    for own, found in (None, 3), (2, 2):
        settings = PipelineConfig(**{key: 3}), EvaluationConfig(**{key: own})
        rollout = RolloutConfig(pipeline=settings[0], val_kwargs=settings[1])
        assert getattr(rollout.spec(), key) == 3
        assert getattr(rollout.held_out_spec(), key) == found
