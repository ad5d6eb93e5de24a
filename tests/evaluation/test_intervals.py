"""Intervals over prompts: quantiles of Student's t, coverage, missing scores, common noises."""

from __future__ import annotations

import math

import numpy as np
import pytest

from flowgrpo_rc.evaluation.intervals import compare, estimate, t_quantile

# Two-sided 95% and 90% points, from the tables of statistics books.
TABLE = {1: (12.706, 6.314), 2: (4.303, 2.920), 5: (2.571, 2.015), 10: (2.228, 1.812)}
TABLE |= {29: (2.045, 1.699), 30: (2.042, 1.697), 120: (1.980, 1.658)}


@pytest.mark.parametrize("df", TABLE)
def test_quantiles_are_those_of_the_tables(df: int) -> None:
    quantiles = t_quantile(df), t_quantile(df, 0.9)
    assert quantiles == pytest.approx(TABLE[df], abs=6e-4)


def test_a_mean_of_four_by_hand() -> None:
    # Mean 2.5, sd 1.2910, t 3.1824.
    interval = estimate(np.array([1.0, 2.0, 3.0, 4.0]))
    half = 3.182446 * math.sqrt(5 / 3) / 2
    assert interval == pytest.approx((2.5, 2.5 - half, 2.5 + half), rel=1e-6)


def test_too_few_prompts_have_no_interval() -> None:
    nan = math.nan
    assert estimate(np.array([3.0])) == pytest.approx((3.0, nan, nan), nan_ok=True)
    assert estimate(np.array([])) == pytest.approx((nan, nan, nan), nan_ok=True)


def test_samples_of_a_prompt_are_not_taken_for_independent() -> None:
    """Many samples of few prompts do not make an interval narrow."""
    rng = np.random.default_rng(0)
    base = np.zeros((6, 50))
    tuned = rng.normal(0, 1, (6, 1)) + rng.normal(0, 0.01, (6, 50))
    change = compare(base, tuned).change
    means = tuned.mean(1)
    assert change.high - change.mean == pytest.approx(2.570582 * means.std(ddof=1) / 6**0.5)


def test_a_sample_that_one_policy_lacks_counts_for_neither() -> None:
    nan = math.nan
    base = np.array([[1.0, 5.0], [2.0, 2.0], [nan, nan], [4.0, 4.0]])
    tuned = np.array([[2.0, nan], [2.0, 4.0], [7.0, 7.0], [5.0, 5.0]])
    comparison = compare(base, tuned)
    assert comparison.num_prompts == 3
    assert comparison.base.mean == pytest.approx((1 + 2 + 4) / 3)
    assert comparison.tuned.mean == pytest.approx((2 + 3 + 5) / 3)
    assert comparison.change.mean == pytest.approx(1.0)
