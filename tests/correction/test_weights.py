"""The modes of importance weights (truncate, clip, mask, icepop), and their normalisation."""

import math

import pytest
import torch
from support.builders import (
    diffusion_batch,
    expected,
    log_probs,
    loss_config,
    mask_of,
    rule_of,
    run,
)
from support.oracles import LEVELS, MODES, Rule

from flowgrpo_rc import RolloutCorrectionConfig, diffusion_loss
from flowgrpo_rc.correction.api import apply_rollout_correction_to_batch
from flowgrpo_rc.correction.correct import Corrector


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("masking", ["right", "empty", "holes"])
@pytest.mark.parametrize(
    "more", [{}, {"normalise": True}, {"normalise": True, "over_kept": True, "veto": 0.5}]
)
def test_every_mode_at_every_level(level, mode, masking, more):
    training, rollout = log_probs(seed=5)
    mask = mask_of(masking)
    rule = rule_of(level, mode, bands=(("token_k2", 0.0, 0.4),), **more)
    actual = run(training, rollout, mask, rule)
    expect = expected(training, rollout, mask, rule)
    weights = torch.tensor(expect.weights, dtype=torch.float64)
    torch.testing.assert_close(actual.weights, weights, rtol=1e-12, atol=0)
    assert actual.mask.tolist() == expect.kept
    assert actual.metrics.compute() == pytest.approx(expect.metrics, rel=1e-10, abs=1e-12)


@pytest.mark.parametrize("level", LEVELS)
def test_the_mask_mode_judges_the_weight_inside_the_safety_bound(level):
    """exp(-40) counts as exp(-20), which is above the lower bound of 1e-10."""
    training = torch.tensor([[-40.0]], dtype=torch.float64)
    mask = torch.ones(1, 1, dtype=torch.bool)
    for lower, kept in ((1e-10, True), (1e-8, False)):
        actual = run(training, torch.zeros_like(training), mask, Rule(level, "mask", lower, 2.0))
        assert actual.mask.item() is kept


@pytest.mark.parametrize("drift", [-18.0, -18.5])
def test_a_mean_of_one_in_a_hundred_million_is_still_divided_by_and_a_smaller_one_is_not(drift):
    """exp(-18) is 1.5e-8, exp(-18.5) is 9.2e-9; the border is 1e-8."""
    training = torch.full((3, 2), drift, dtype=torch.float64)
    rule = Rule("token", normalise=True)
    actual = run(training, torch.zeros_like(training), torch.ones(3, 2, dtype=torch.bool), rule)
    expect = 1.0 if drift > -18.4 else math.exp(drift)
    assert actual.weights.flatten().tolist() == pytest.approx([expect] * 6, rel=1e-6)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_small_weights_are_normalised_before_they_are_rounded(level, dtype):
    """exp(-16.3) is 8.3e-8, between the two smallest numbers of fp16; the mean weight is 1."""
    training = torch.full((3, 1), -16.3, dtype=dtype)
    mask = torch.ones(3, 1, dtype=torch.bool)
    weights = run(training, 0 * training, mask, Rule(level, normalise=True)).weights
    assert weights.dtype == dtype
    assert weights.flatten().tolist() == [1.0] * 3
    # In the loss, which divides by the mean of all micro-batches later.
    config = RolloutCorrectionConfig(rollout_is=level, rollout_is_batch_normalize=True)
    actual = Corrector(config)(training, 0 * training, mask, all_reduce=None)
    assert (actual.weights / (actual.weight_sums[0] / actual.weight_sums[1])).tolist() == [
        [1.0]
    ] * 3


@pytest.mark.parametrize(
    "mode", [{}, {"bypass_mode": True, "loss_type": "reinforce"}], ids=["decoupled", "reinforce"]
)
def test_log_prob_scale_sum_multiplies_by_the_number_of_elements(mode):
    """Weights and rejection are those of D times the log-probs; the loss itself keeps the mean."""
    training, rollout = log_probs(scale=0.02)
    chosen = {
        "rollout_is": "token",
        "rollout_rs": "token_k1",
        "rollout_rs_threshold": "0.8_1.25",
        **mode,
    }
    fields = {"advantages": torch.ones_like(rollout), "all_latents": torch.zeros(6, 5, 3, 7)}
    config = RolloutCorrectionConfig(log_prob_scale="sum", **chosen)
    config.validate()
    actual = Corrector(RolloutCorrectionConfig(**chosen))(
        21 * training, 21 * rollout, torch.ones(6, 4).bool()
    )
    assert 0 < actual.mask.sum() < 24
    if not mode:
        batch = diffusion_batch(rollout).replace(old_log_probs=training, **fields)
        batch, metrics = apply_rollout_correction_to_batch(batch, config)
        torch.testing.assert_close(batch.rollout_is_weights, actual.weights, rtol=1e-12, atol=0)
        assert torch.equal(batch.rejection_mask, actual.mask)
        assert metrics.compute() == pytest.approx(actual.metrics.compute(), rel=1e-12, abs=1e-12)
        return
    leaf = training.clone().requires_grad_()
    batch = diffusion_batch(rollout).replace(old_log_probs=rollout, **fields)
    diffusion_loss(loss_config(config), leaf, batch)[0].backward()
    torch.testing.assert_close(
        leaf.grad, torch.where(actual.mask, -actual.weights / 24, 0.0), rtol=1e-12, atol=0
    )
