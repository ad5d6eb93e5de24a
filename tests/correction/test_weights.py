"""The modes of importance weights (truncate, clip, mask, icepop), normalisation over what is kept,
blocks, names.
"""

from __future__ import annotations

import math

import pytest
import torch
from support.builders import (
    MASKS,
    diffusion_batch,
    expected,
    log_probs,
    loss_config,
    mask_of,
    run,
    settings,
)
from support.oracles import LEVELS, MODES, Rule

from flowgrpo_rc import RolloutCorrectionConfig, compute_rollout_correction_weights, diffusion_loss
from flowgrpo_rc.correction import correct as module
from flowgrpo_rc.correction.api import apply_rollout_correction_to_batch
from flowgrpo_rc.correction.correct import Correction, Corrector
from flowgrpo_rc.correction.thresholds import IS_MODES

BOUNDS = {"truncate": (0.0, 1.3), "clip": (0.8, 1.3), "mask": (0.8, 1.3), "icepop": (0.8, 1.3)}


def rule_of(level: str, mode: str, **others) -> Rule:
    lower, upper = BOUNDS[mode]
    return Rule(level, mode, lower, upper, **others)


def assert_same(found: Correction, other: Correction) -> None:
    assert torch.equal(found.mask, other.mask)
    torch.testing.assert_close(found.weights, other.weights, rtol=1e-14, atol=0)
    assert found.metrics.compute() == pytest.approx(other.metrics.compute(), rel=1e-12, abs=1e-12)


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
    mask, rule = mask_of(masking), rule_of(level, mode, bands=(("token_k2", 0.0, 0.4),), **more)
    found, expect = run(training, rollout, mask, rule), expected(training, rollout, mask, rule)
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
def test_by_hand(mode, weights, kept):
    """Ratios 0.1, 1/2, 1, 2, 4 and e^30 against the bounds 1/2 and 2, which belong to the inside
    (up to rounding).
    """
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
def test_one_number_has_its_reciprocal_beside_it(mode):
    training, rollout = log_probs()
    one, pair = (
        RolloutCorrectionConfig(
            rollout_is="token", rollout_is_mode=mode, rollout_is_threshold=threshold
        )
        for threshold in (1.25, "0.8_1.25")
    )
    assert_same(*(Corrector(config)(training, rollout, mask_of("left")) for config in (one, pair)))


def test_a_pair_means_icepop_and_a_number_truncation_unless_a_mode_is_given():
    training, rollout = log_probs()
    for threshold, implied in (("0.8_1.3", "icepop"), (1.3, "truncate")):
        keys = {"rollout_is": "sequence", "rollout_is_threshold": threshold}
        without, given = (
            RolloutCorrectionConfig(**keys, rollout_is_mode=mode) for mode in (None, implied)
        )
        assert_same(
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
def test_an_outlier_of_the_mask_mode_is_one_of_the_level(level, kept):
    """Ratios 4 and 1/4: tokens outside 0.5 to 2, product and geometric mean 1."""
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
    """exp(-40) counts as exp(-20), which a lower bound of 1e-10 lets in."""
    training, mask = (
        torch.tensor([[-40.0]], dtype=torch.float64),
        torch.ones(1, 1, dtype=torch.bool),
    )
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
def test_over_kept_the_kept_weights_have_mean_one(level, mode):
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


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("elements", [1, 8, 12, 16])
@pytest.mark.parametrize("masking", ["right", "empty"])
def test_the_borders_of_blocks_change_nothing(monkeypatch, level, elements, masking):
    """Blocks of 1, 2, 3 and 4 rows of the 6, one step of which is not finite."""
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
    assert_same(run(training, rollout, mask_of(masking), rule), whole)


def test_a_batch_larger_than_a_block_is_its_rows():
    """Copies of 6 rows, more than fit into one block: weights and mask repeat, and the means are
    those of the 6.
    """
    training, rollout = log_probs()
    mask, rule = mask_of("right"), Rule("sequence", bands=(("seq_mean_k1", 0.7, 1.5),))
    copies = module._BLOCK["cpu"] // mask.numel() + 100
    small = run(training, rollout, mask, rule)
    large = run(*(x.repeat(copies, 1) for x in (training, rollout, mask)), rule)
    assert torch.equal(large.mask, small.mask.repeat(copies, 1))
    assert torch.equal(large.weights, small.weights.repeat(copies, 1))
    values, expect = large.metrics.compute(), small.metrics.compute()
    assert values.keys() == expect.keys()
    same = {name for name in expect if not name.endswith("seq_std")}
    assert {n: values[n] for n in same} == pytest.approx(
        {n: expect[n] for n in same}, rel=1e-10, abs=1e-12
    )
    for name in expect.keys() - same:
        assert values[name] == pytest.approx(expect[name] * math.sqrt(5 / 6), rel=1e-3)


# --- Custom corrections and metric names


@pytest.mark.parametrize("normalise", [True, False])
def test_a_custom_correction_takes_the_place_of_weights_and_mask(normalise):
    training, rollout = log_probs()
    training[2, 1] = math.nan
    mask = mask_of("right")
    config = RolloutCorrectionConfig(custom_correction="builders:drop_odd")
    config.validate()
    found = Corrector(config)(training, rollout, mask, normalise=normalise)
    valid = mask & torch.isfinite(training)
    even = (torch.arange(6) % 2 == 0).unsqueeze(1)
    assert torch.equal(found.mask, valid & even)
    assert torch.equal(found.weights, 3.0 * valid)
    values = found.metrics.compute()
    assert values["rollout_is_mean"] == values["rollout_is_max"] == 3
    assert values["kl"] == pytest.approx(expected(training, rollout, mask, Rule()).metrics["kl"])
    assert values["rollout_is_masked_fraction"] == pytest.approx(
        1 - (valid & even).sum().item() / mask.sum().item()
    )


@pytest.mark.parametrize("function", ["drop_odd", "only_a_mask"])
def test_a_custom_correction_has_the_metrics_that_documents_read(function):
    training, rollout = log_probs()
    config = RolloutCorrectionConfig(custom_correction=f"builders:{function}")
    values = Corrector(config)(training, rollout, mask_of("full")).metrics.compute()
    assert values.keys() == expected(training, rollout, mask_of("full"), Rule()).metrics.keys()
    assert values["rollout_is_veto_fraction"] == 0


def test_the_weights_of_a_custom_correction_are_normalised_where_the_settings_say_so():
    """In decoupled mode here; in bypass mode the loss divides by the mean."""
    training, rollout = log_probs()
    keys = {
        "rollout_is": "token",
        "rollout_is_batch_normalize": True,
        "custom_correction": "builders:drop_odd",
    }
    found = Corrector(RolloutCorrectionConfig(**keys))(training, rollout, mask_of("right"))
    assert torch.equal(found.weights, mask_of("right").double())
    assert found.metrics.compute()["rollout_is_batch_norm_factor"] == 3


@pytest.mark.parametrize("function", ["a_wrong_shape", "wrong_weights"])
def test_a_custom_correction_of_another_shape_is_refused(function):
    training, rollout = log_probs()
    config = RolloutCorrectionConfig(custom_correction=f"builders:{function}")
    with pytest.raises(ValueError, match=rf"builders:{function}.*\(6, 4\)"):
        Corrector(config)(training, rollout, mask_of("full"))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("metric_names", ["slime", "both"])
def test_slime_names(mode, metric_names):
    training, rollout = log_probs()
    rule = rule_of("geometric", mode, veto=0.4, normalise=True)
    config = RolloutCorrectionConfig(**settings(rule), metric_names=metric_names)
    verl = expected(training, rollout, mask_of("right"), rule).metrics
    documented = {
        "mismatch_training_log_ppl": "training_log_ppl",
        "mismatch_training_ppl": "training_ppl",
        "mismatch_rollout_log_ppl": "rollout_log_ppl",
        "mismatch_rollout_ppl": "rollout_ppl",
        "mismatch_kl": "kl",
        "mismatch_k3_kl": "k3_kl",
        "mismatch_log_ppl_diff": "log_ppl_diff",
        "mismatch_log_ppl_abs_diff": "log_ppl_abs_diff",
        "mismatch_ppl_ratio": "ppl_ratio",
        "train_rollout_logprob_abs_diff": "logprob_abs_diff_mean",
        "mis_mean_is_weight_before_clip": "rollout_is_raw_mean",
        "mis_ratio_mean_after_mis": "rollout_is_mean",
        "mis_catastrophic_token_fraction": "rollout_is_catastrophic_token_fraction",
        "mis_catastrophic_seq_fraction": "rollout_is_veto_fraction",
        "mis_batch_norm_factor": "rollout_is_batch_norm_factor",
    }
    high, low = "rollout_is_ratio_fraction_high", "rollout_is_ratio_fraction_low"
    documented |= {
        "truncate": {"mis_truncate_fraction": high},
        "clip": {"mis_clip_fraction_low": low, "mis_clip_fraction_high": high},
        "mask": {"mis_mask_fraction_low": low, "mis_mask_fraction_high": high},
        "icepop": {},
    }[mode]
    renamed = {new: verl[old] for new, old in documented.items()}
    left = (
        verl
        if metric_names == "both"
        else {n: v for n, v in verl.items() if n not in documented.values()}
    )
    found = Corrector(config)(training, rollout, mask_of("right")).metrics.compute()
    assert found == pytest.approx(left | renamed, rel=1e-10, abs=1e-12)


@pytest.mark.parametrize("mode", ["clip", "mask"])
@pytest.mark.parametrize("metric_names", ["slime", "both"])
def test_renamed_metrics_still_combine(mode, metric_names):
    training, rollout = log_probs()
    config = RolloutCorrectionConfig(**settings(rule_of("token", mode)), metric_names=metric_names)
    whole = Corrector(config)(training, rollout, mask_of("right")).metrics
    first, second = (
        Corrector(config)(training[rows], rollout[rows], mask_of("right")[rows]).metrics
        for rows in (slice(0, 2), slice(2, 6))
    )
    first.merge(second)
    assert first.compute() == pytest.approx(whole.compute(), rel=1e-12, abs=1e-12)


# --- The scale of a log-prob


@pytest.mark.parametrize(
    "mode", [{}, {"bypass_mode": True, "loss_type": "reinforce"}], ids=["decoupled", "reinforce"]
)
def test_the_sum_over_latent_elements_is_so_many_times_the_mean(mode):
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
