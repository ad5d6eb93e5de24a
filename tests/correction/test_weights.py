"""The modes of importance weights (truncate, clip, mask, icepop), and their normalisation."""

from __future__ import annotations

import math

import pytest
import torch
from support.builders import (
    MASKS,
    assert_same_correction,
    diffusion_batch,
    expected,
    log_probs,
    loss_config,
    mask_of,
    rule_of,
    run,
)
from support.oracles import LEVELS, MODES, Rule

from flowgrpo_rc import RolloutCorrectionConfig, compute_rollout_correction_weights, diffusion_loss
from flowgrpo_rc.correction.api import apply_rollout_correction_to_batch
from flowgrpo_rc.correction.correct import Corrector
from flowgrpo_rc.correction.thresholds import IS_MODES


def test_the_modes_are_the_documented_ones():
    assert set(IS_MODES) == set(MODES)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("masking", MASKS)
@pytest.mark.parametrize(
    "more", [{}, {"normalise": True}, {"normalise": True, "over_kept": True, "veto": 0.5}]
)
def test_every_mode_at_every_level(level, mode, masking, more):
    training, rollout = log_probs(seed=5)
    mask = mask_of(masking)
    rule = rule_of(level, mode, bands=(("token_k2", 0.0, 0.4),), **more)
    found = run(training, rollout, mask, rule)
    expect = expected(training, rollout, mask, rule)
    weights = torch.tensor(expect.weights, dtype=torch.float64)
    torch.testing.assert_close(found.weights, weights, rtol=1e-12, atol=0)
    assert found.mask.tolist() == expect.kept
    assert found.metrics.compute() == pytest.approx(expect.metrics, rel=1e-10, abs=1e-12)


@pytest.mark.parametrize(
    ("mode", "weights", "kept"),
    [
        ("truncate", [0.1, 0.5, 1.0, 2.0, 2.0, 2.0], [1, 1, 1, 1, 1, 1]),
        ("clip", [0.5, 0.5, 1.0, 2.0, 2.0, 2.0], [1, 1, 1, 1, 1, 1]),
        ("mask", [0.1, 0.5, 1.0, 2.0, 4.0, math.exp(20)], [0, 1, 1, 1, 0, 0]),
        ("icepop", [0.0, 0.5, 1.0, 2.0, 0.0, 0.0], [1, 1, 1, 1, 1, 1]),
    ],
)
def test_modes_by_hand(mode, weights, kept):
    """Ratios 0.1, 1/2, 1, 2, 4 and e^30; the bounds 1/2 and 2 are inside, up to rounding."""
    ratio = torch.tensor(
        [[0.1], [0.5 + 1e-12], [1.0], [2.0 - 1e-12], [4.0], [math.exp(30)]], dtype=torch.float64
    )
    mask = torch.ones(6, 1, dtype=torch.bool)
    threshold = 2.0 if mode == "truncate" else "0.5_2.0"
    config = RolloutCorrectionConfig(
        rollout_is="token", rollout_is_mode=mode, rollout_is_threshold=threshold
    )
    found = Corrector(config)(ratio.log(), torch.zeros_like(ratio), mask)
    assert found.weights.flatten().tolist() == pytest.approx(weights, rel=1e-11)
    assert found.mask.flatten().tolist() == kept
    values = found.metrics.compute()
    assert values["rollout_is_ratio_fraction_high"] == pytest.approx(2 / 6)
    assert values["rollout_is_ratio_fraction_low"] == pytest.approx(1 / 6)
    assert values.get("rollout_is_oob_ratio") == (
        None if mode == "truncate" else pytest.approx(3 / 6)
    )


@pytest.mark.parametrize("mode", ["clip", "mask", "icepop"])
def test_one_number_is_a_band_with_its_reciprocal(mode):
    training, rollout = log_probs()
    one, pair = (
        RolloutCorrectionConfig(
            rollout_is="token", rollout_is_mode=mode, rollout_is_threshold=threshold
        )
        for threshold in (1.25, "0.8_1.25")
    )
    assert_same_correction(
        *(Corrector(config)(training, rollout, mask_of("left")) for config in (one, pair))
    )


def test_a_pair_means_icepop_and_a_number_truncation_unless_a_mode_is_given():
    training, rollout = log_probs()
    for threshold, implied in (("0.8_1.3", "icepop"), (1.3, "truncate")):
        keys = {"rollout_is": "sequence", "rollout_is_threshold": threshold}
        without, given = (
            RolloutCorrectionConfig(**keys, rollout_is_mode=mode) for mode in (None, implied)
        )
        assert_same_correction(
            *(Corrector(config)(training, rollout, mask_of("full")) for config in (without, given))
        )
    difference = (training - rollout)[:, :1]
    weights = compute_rollout_correction_weights(
        difference, torch.ones(6, 1), rollout_is="token", rollout_is_threshold="0.8_1.3"
    )
    inside = (difference.exp() >= 0.8) & (difference.exp() <= 1.3)
    torch.testing.assert_close(
        weights, torch.where(inside, difference.exp(), 0.0), rtol=1e-14, atol=0
    )


@pytest.mark.parametrize(
    ("level", "kept"), [("token", [0, 1]), ("sequence", [1, 1]), ("geometric", [1, 1])]
)
def test_the_level_decides_what_is_an_outlier_of_the_mask_mode(level, kept):
    """Ratios 4 and 1/4: both tokens are outside 0.5 to 2; product and geometric mean are 1."""
    training = torch.tensor([[math.log(4), -math.log(4)], [0.0, 0.1]], dtype=torch.float64)
    mask = torch.ones(2, 2, dtype=torch.bool)
    found = run(training, torch.zeros_like(training), mask, Rule(level, "mask", 0.5, 2.0))
    assert found.mask.int().tolist() == [[flag] * 2 for flag in kept]
    values = found.metrics.compute()
    assert (
        values["rollout_is_masked_fraction"]
        == values["rollout_is_seq_masked_fraction"]
        == 1 - kept[0] / 2 - 0.5
    )


@pytest.mark.parametrize("level", LEVELS)
def test_the_mask_mode_judges_the_weight_inside_the_safety_bound(level):
    """exp(-40) counts as exp(-20), which is above the lower bound of 1e-10."""
    training = torch.tensor([[-40.0]], dtype=torch.float64)
    mask = torch.ones(1, 1, dtype=torch.bool)
    for lower, kept in ((1e-10, True), (1e-8, False)):
        found = run(training, torch.zeros_like(training), mask, Rule(level, "mask", lower, 2.0))
        assert found.mask.item() is kept


@pytest.mark.parametrize("level", LEVELS)
def test_a_veto_leaves_the_weights_as_they_are(level):
    training, rollout = log_probs()
    with_veto, without = (
        run(training, rollout, mask_of("right"), Rule(level, veto=veto)) for veto in (0.6, None)
    )
    assert torch.equal(with_veto.weights, without.weights)
    assert not torch.equal(with_veto.mask, without.mask)


# --- Batch normalisation


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", MODES)
def test_normalised_over_kept_steps_their_weights_have_mean_one(level, mode):
    training, rollout = log_probs(seed=5)
    rule = rule_of(level, mode, bands=(("token_k1", 0.7, 1.9),), normalise=True, over_kept=True)
    found = run(training, rollout, mask_of("right"), rule)
    assert 0 < found.mask.sum() < mask_of("right").sum()
    rows = [w[k] for w, k in zip(found.weights, found.mask, strict=True) if k.any()]
    means = torch.cat(rows) if level == "token" else torch.stack([row.mean() for row in rows])
    assert means.mean().item() == pytest.approx(1, abs=1e-13)
    unkept = run(training, rollout, mask_of("right"), rule._replace(over_kept=False))
    assert not torch.allclose(found.weights, unkept.weights)


@pytest.mark.parametrize("level", LEVELS)
def test_weights_that_are_all_zero_are_divided_by_one(level):
    training = torch.full((3, 2), 3.0, dtype=torch.float64)
    found = run(
        training,
        torch.zeros_like(training),
        torch.ones(3, 2, dtype=torch.bool),
        rule_of(level, "icepop", normalise=True),
    )
    assert torch.count_nonzero(found.weights) == 0
    values = found.metrics.compute()
    assert values["rollout_is_batch_norm_factor"] == 1
    assert values["rollout_is_eff_sample_size"] == 0
    assert values["rollout_is_oob_ratio"] == 1


@pytest.mark.parametrize("drift", [-18.0, -18.5])
def test_a_mean_of_one_in_a_hundred_million_is_still_divided_by_and_a_smaller_one_is_not(drift):
    """exp(-18) is 1.5e-8, exp(-18.5) is 9.2e-9; the border is 1e-8."""
    training = torch.full((3, 2), drift, dtype=torch.float64)
    rule = Rule("token", normalise=True)
    found = run(training, torch.zeros_like(training), torch.ones(3, 2, dtype=torch.bool), rule)
    expect = 1.0 if drift > -18.4 else math.exp(drift)
    assert found.weights.flatten().tolist() == pytest.approx([expect] * 6, rel=1e-6)


# --- Blocks of rows


# --- Custom corrections and metric names


# --- The scale of a log-prob


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
    found = Corrector(RolloutCorrectionConfig(**chosen))(
        21 * training, 21 * rollout, torch.ones(6, 4).bool()
    )
    assert 0 < found.mask.sum() < 24
    if not mode:
        batch = diffusion_batch(rollout).replace(old_log_probs=training, **fields)
        batch, metrics = apply_rollout_correction_to_batch(batch, config)
        torch.testing.assert_close(batch.rollout_is_weights, found.weights, rtol=1e-12, atol=0)
        assert torch.equal(batch.rejection_mask, found.mask)
        assert metrics.compute() == pytest.approx(found.metrics.compute(), rel=1e-12, abs=1e-12)
        return
    leaf = training.clone().requires_grad_()
    batch = diffusion_batch(rollout).replace(old_log_probs=rollout, **fields)
    diffusion_loss(loss_config(config), leaf, batch)[0].backward()
    torch.testing.assert_close(
        leaf.grad, torch.where(found.mask, -found.weights / 24, 0.0), rtol=1e-12, atol=0
    )
