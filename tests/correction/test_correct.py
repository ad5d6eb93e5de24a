"""Importance weights and values that are not finite, against the decimal formulas of `oracles`."""

from __future__ import annotations

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

from flowgrpo_rc import (
    compute_rollout_correction_weights,
)
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
    found = run(training, torch.zeros_like(training), mask, Rule(level, upper=WIDE))
    expect = tensor([math.exp(min(max(x, -20), 20)) for x in whole])
    torch.testing.assert_close(found.weights[:, 0], expect, rtol=1e-7, atol=0)


@pytest.mark.parametrize("drift", [-0.7, -1e-4, 1e-8, 1e-4, 0.3, 3.0])
@pytest.mark.parametrize("level", LEVELS)
def test_an_injected_drift_gives_the_closed_form_weight(drift, level):
    _, rollout = log_probs()
    lengths = mask_of("right").sum(1).double()
    found = run(rollout + drift, rollout, mask_of("right"), Rule(level))
    exponent = drift * (lengths if level == "sequence" else torch.ones_like(lengths))
    torch.testing.assert_close(
        found.weights[:, 0], torch.exp(exponent).clamp(max=2.0), rtol=1e-12, atol=0
    )
    assert found.metrics.compute()["kl"] == pytest.approx(-drift, abs=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("masking", MASKS)
def test_on_policy_weights_are_exactly_one_and_nothing_is_rejected(dtype, level, masking):
    _, rollout = log_probs()
    mask = mask_of(masking)
    narrow = tuple((name, 1 - 1e-12, 1 + 1e-12) for name in CRITERIA)
    found = run(
        rollout.to(dtype),
        rollout.to(dtype),
        mask,
        Rule(level, bands=narrow, veto=0.999999, normalise=True),
    )
    assert found.weights.dtype == dtype
    assert torch.equal(found.weights, mask.to(dtype))
    assert torch.equal(found.mask, mask)
    values = found.metrics.compute()
    ones = {
        "rollout_is_mean",
        "rollout_is_eff_sample_size",
        "ppl_ratio",
        "rollout_is_batch_norm_factor",
    }
    assert {values[name] for name in ones} == {1}
    zeros = [
        name
        for name in values
        if name.startswith(("kl", "k3", "chi2", "rollout_rs", "logprob", "log_ppl"))
    ]
    assert {values[name] for name in [*zeros, "rollout_is_std", "rollout_is_veto_fraction"]} == {0}


def test_batch_normalisation_by_hand_counts_tokens_or_sequences():
    """Ratios 2 | 1, 1, 1: tokens have mean 5/4, sequences (2 + 1)/2; products are the same here."""
    training = tensor([[math.log(2), 0, 0], [0, 0, 0]])
    mask = torch.tensor([[True, False, False], [True, True, True]])
    for level, mean in (("token", 5 / 4), ("sequence", 3 / 2), ("geometric", 3 / 2)):
        found = run(training, torch.zeros_like(training), mask, Rule(level, normalise=True))
        torch.testing.assert_close(found.weights[:, 0], tensor([2 / mean, 1 / mean]))


@pytest.mark.parametrize("level", LEVELS)
def test_nothing_carries_a_gradient(level):
    training, rollout = log_probs()
    training.requires_grad_()
    rollout.requires_grad_()
    mask = mask_of("full")
    found = run(
        training,
        rollout,
        mask,
        Rule(level, bands=(("token_k1", 0.7, 1.5),), veto=0.5, normalise=True),
    )
    assert not found.weights.requires_grad
    assert not found.mask.requires_grad
    assert not compute_rollout_correction_weights(
        training - rollout, mask, rollout_is=level
    ).requires_grad


# --- What is not finite


@pytest.mark.parametrize(("training_value", "rollout_value"), NOT_FINITE)
@pytest.mark.parametrize("rule", [Rule(), Rule("token"), Rule("sequence", normalise=True)])
@pytest.mark.parametrize("criterion", [None, "token_k1", "seq_sum_k3", "seq_max_k2"])
def test_a_row_that_is_not_finite_is_rejected_and_counted_nowhere_else(
    training_value, rollout_value, rule, criterion
):
    training, rollout = log_probs(shape=(6, 1))
    training[2] = training_value
    rollout[2] = rollout_value
    mask = torch.ones(6, 1, dtype=torch.bool)
    rule = rule._replace(bands=() if criterion is None else ((criterion, 0.6, 1.8),))
    others = torch.tensor([0, 1, 3, 4, 5])
    found = run(training, rollout, mask, rule)
    clean = run(training[others], rollout[others], mask[others], rule)
    assert not found.mask[2].any()
    assert torch.equal(found.mask[others], clean.mask)
    if rule.level is not None:
        assert found.weights[2].item() == 0
        torch.testing.assert_close(found.weights[others], clean.weights, rtol=1e-14, atol=0)
    values = found.metrics.compute()
    expect = clean.metrics.compute()
    assert all(math.isfinite(value) for value in values.values())
    totals = [
        f"rollout_{kind}_{unit}masked_fraction" for kind in ("is", "rs") for unit in ("", "seq_")
    ]
    for name in [*totals, "rejected_ratio"]:
        assert values.pop(name) == pytest.approx((5 * expect.pop(name) + 1) / 6, abs=1e-14)
    assert values.pop("rollout_rs_nonfinite_fraction") == pytest.approx(1 / 6)
    assert expect.pop("rollout_rs_nonfinite_fraction") == 0
    assert values == pytest.approx(expect, abs=1e-14)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("criterion", CRITERIA)
def test_one_bad_step_rejects_itself_and_under_a_sequence_criterion_its_sequence(bad, criterion):
    difference = tensor([[0.1, bad, 0.0], [0.1, 0.2, 0.0]])
    zero = torch.zeros_like(difference)
    mask = torch.ones(2, 3, dtype=torch.bool)
    expect = [[criterion.startswith("token"), False, criterion.startswith("token")], [True] * 3]
    rule = Rule("sequence", bands=((criterion, 0.5, 2.0),))
    found = run(difference, zero, mask, rule)
    assert found.mask.tolist() == expect
    assert found.metrics.compute() == pytest.approx(
        expected(difference, zero, mask, rule).metrics, abs=1e-12
    )
    torch.testing.assert_close(found.weights[0], tensor([math.exp(0.1), 0, math.exp(0.1)]))


def test_a_batch_without_any_finite_value():
    training = torch.full((3, 2), math.nan)
    found = run(
        training,
        torch.zeros(3, 2),
        torch.ones(3, 2, dtype=torch.bool),
        Rule("token", normalise=True),
    )
    assert torch.count_nonzero(found.weights) == 0
    assert not found.mask.any()
    values = found.metrics.compute()
    assert values["rollout_rs_nonfinite_fraction"] == 1
    assert values["rollout_rs_masked_fraction"] == 1
    assert all(math.isfinite(value) for value in values.values())


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


def test_copies_of_a_batch_in_several_blocks_have_its_weights_and_means():
    """Weights and mask repeat, and the means are those of the 6 rows."""
    training, rollout = log_probs()
    mask = mask_of("right")
    rule = Rule("sequence", bands=(("seq_mean_k1", 0.7, 1.5),))
    copies = module._BLOCK["cpu"] // mask.numel() + 100
    small = run(training, rollout, mask, rule)
    large = run(*(x.repeat(copies, 1) for x in (training, rollout, mask)), rule)
    assert torch.equal(large.mask, small.mask.repeat(copies, 1))
    assert torch.equal(large.weights, small.weights.repeat(copies, 1))
    values = large.metrics.compute()
    expect = small.metrics.compute()
    assert values.keys() == expect.keys()
    same = {name for name in expect if not name.endswith("seq_std")}
    assert {n: values[n] for n in same} == pytest.approx(
        {n: expect[n] for n in same}, rel=1e-10, abs=1e-12
    )
    for name in expect.keys() - same:
        assert values[name] == pytest.approx(expect[name] * math.sqrt(5 / 6), rel=1e-3)
