"""Importance weights and values that are not finite, against the decimal formulas of `oracles`."""

import math

import pytest
import torch
from support.builders import (
    MASKS,
    NOT_FINITE,
    assert_same_correction,
    expected,
    log_probs,
    mask_of,
    rule_of,
    run,
    tensor,
)
from support.oracles import CRITERIA, LEVELS, Rule

from flowgrpo_rc.correction import correct as module

WIDE = 1e30  # a bound that truncates nothing


# --- Weights


@pytest.mark.parametrize(
    ("level", "whole"), [("sequence", [1, 30, 1, -40]), ("geometric", [0.5, 15, 0.5, -20])]
)
def test_the_safety_bound_holds_for_the_aggregate_and_not_for_its_factors(level, whole):
    """Factors e^15 and e^-14 multiply to e; e^15 twice is bounded to e^20."""
    training = tensor([[15, -14], [15, 15], [30, -29], [-40, 0]])
    mask = torch.ones(4, 2, dtype=torch.bool)
    actual = run(training, torch.zeros_like(training), mask, Rule(level, upper=WIDE))
    expect = tensor([math.exp(min(max(x, -20), 20)) for x in whole])
    torch.testing.assert_close(actual.weights[:, 0], expect, rtol=1e-7, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("masking", MASKS)
def test_on_policy_weights_are_exactly_one_and_nothing_is_rejected(dtype, level, masking):
    rollout = log_probs()[1].to(dtype)
    mask = mask_of(masking)
    narrow = tuple((name, 1 - 1e-12, 1 + 1e-12) for name in CRITERIA)
    rule = Rule(level, bands=narrow, veto=0.999999, normalise=True)
    actual = run(rollout, rollout, mask, rule)
    assert actual.weights.dtype == dtype
    assert torch.equal(actual.weights, mask.to(dtype))
    assert torch.equal(actual.mask, mask)
    values = actual.metrics.compute()
    ones = ("rollout_is_mean", "rollout_is_eff_sample_size", "ppl_ratio")
    assert {values[name] for name in (*ones, "rollout_is_batch_norm_factor")} == {1}
    zeros = ("kl", "k3", "chi2", "rollout_rs", "logprob", "log_ppl")
    names = [name for name in values if name.startswith(zeros)]
    assert {values[name] for name in [*names, "rollout_is_std", "rollout_is_veto_fraction"]} == {0}


@pytest.mark.parametrize("level", LEVELS)
def test_nothing_carries_a_gradient(level):
    training, rollout = (x.requires_grad_() for x in log_probs())
    rule = Rule(level, bands=(("token_k1", 0.7, 1.5),), veto=0.5, normalise=True)
    actual = run(training, rollout, mask_of("full"), rule)
    assert not actual.weights.requires_grad
    assert not actual.mask.requires_grad


# --- What is not finite


@pytest.mark.parametrize(("training_value", "rollout_value"), NOT_FINITE)
@pytest.mark.parametrize("level", [None, "sequence"])
@pytest.mark.parametrize("criterion", [None, "token_k1", "seq_sum_k1", "seq_mean_k3", "seq_max_k2"])
def test_a_step_that_is_not_finite_is_rejected_and_counted_nowhere_else(
    training_value, rollout_value, level, criterion
):
    """A criterion of sequences rejects its sequence, too."""
    training = tensor([[0.1, training_value, 0.0], [0.1, 0.2, 0.0]])
    rollout = tensor([[0.0, rollout_value, 0.0], [0.0, 0.0, 0.0]])
    mask = torch.ones(2, 3, dtype=torch.bool)
    bands = () if criterion is None else ((criterion, 0.5, 2.0),)
    rule = Rule(level, bands=bands, normalise=level == "sequence")
    actual = run(training, rollout, mask, rule)
    others = criterion is None or criterion.startswith("token")
    assert actual.mask.tolist() == [[others, False, others], [True] * 3]
    expect = expected(training, rollout, mask, rule)
    assert actual.metrics.compute() == pytest.approx(expect.metrics, abs=1e-12)
    if level is not None:
        torch.testing.assert_close(actual.weights, tensor(expect.weights), rtol=1e-14, atol=0)


# --- Batches


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("elements", [1, 8, 12, 16])
@pytest.mark.parametrize("masking", ["right", "empty"])
def test_the_borders_of_blocks_change_nothing(monkeypatch, level, elements, masking):
    """Blocks of 1, 2, 3 and 4 of the 6 rows; one step is not finite."""
    training, rollout = log_probs(seed=5)
    training[3, 0] = math.nan
    rule = rule_of(
        level,
        "mask",
        bands=(("seq_mean_k1", 0.6, 1.7), ("token_k3", 0.0, 0.5)),
        veto=0.3,
        normalise=True,
    )
    whole = run(training, rollout, mask_of(masking), rule)
    monkeypatch.setitem(module._BLOCK, "cpu", elements)
    assert_same_correction(run(training, rollout, mask_of(masking), rule), whole)
