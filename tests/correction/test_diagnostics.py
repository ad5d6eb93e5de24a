"""The metrics of the correction: their names, their values by hand, and their precision."""

from __future__ import annotations

import math

import pytest
import torch
from support.builders import expected, run
from support.oracles import LEVELS, Rule

from flowgrpo_rc import compute_rollout_correction_and_rejection_mask


def test_metrics_by_hand():
    """Two sequences with differences (log 2, 0) and (-log 4): the ratios are 2, 1 and 1/4."""
    training = torch.tensor([[math.log(2) - 1, -1.0], [-math.log(4) - 2, 7.0]], dtype=torch.float64)
    rollout = torch.tensor([[-1.0, -1.0], [-2.0, 9.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True], [True, False]])
    rule = Rule("sequence", upper=1.5, bands=(("seq_mean_k1", 0.5, 1.6),))
    values = run(training, rollout, mask, rule).metrics.compute()
    log2 = math.log(2)
    by_hand = {
        "log_ppl_diff": (-log2 / 2 + 2 * log2) / 2,
        "log_ppl_abs_diff": (log2 / 2 + 2 * log2) / 2,
        "log_ppl_diff_max": 2 * log2,
        "log_ppl_diff_min": -log2 / 2,
        "ppl_ratio": (2**-0.5 + 4) / 2,
        "training_ppl": (math.e / 2**0.5 + 4 * math.e**2) / 2,
        "rollout_ppl": (math.e + math.e**2) / 2,
        "kl": (-log2 + 0 + 2 * log2) / 3,
        "k3_kl": (1 - log2 + 0 + 1 / 4 - 1 + 2 * log2) / 3,
        "chi2_token": (4 + 1 + 1 / 16) / 3 - 1,
        "chi2_seq": (4 + 1 / 16) / 2 - 1,
        "rollout_is_mean": (1.5 + 1.5 + 0.25) / 3,
        "rollout_is_raw_mean": (2 + 2 + 0.25) / 3,
        "rollout_is_max": 2,
        "rollout_is_min": 1 / 4,
        "rollout_is_eff_sample_size": (3.25 / 3) ** 2 / ((2.25 + 2.25 + 0.0625) / 3),
        "rollout_is_ratio_fraction_high": 1 / 2,
        "rollout_is_ratio_fraction_low": 1 / 2,
        "rollout_is_seq_mean": 1.75 / 2,
        "rollout_is_seq_std": 1.25 / math.sqrt(2),
        "rollout_rs_seq_mean_k1_mean": (-log2 / 2 - log2 / 2 + 2 * log2) / 3,
        "rollout_rs_seq_mean_k1_max": 2 * log2,
        "rollout_rs_seq_mean_k1_min": -log2 / 2,
        "rollout_rs_seq_mean_k1_fraction_high": 1 / 2,
        "rollout_rs_seq_mean_k1_fraction_low": 0,
        "rollout_rs_seq_mean_k1_masked_fraction": 1 / 3,
        "rollout_rs_seq_mean_k1_seq_masked_fraction": 1 / 2,
        "rollout_rs_seq_mean_k1_seq_max_deviation": 2 * log2,
        "rollout_rs_seq_mean_k1_seq_std": 2.5 * log2 / math.sqrt(2),
        "rollout_rs_masked_fraction": 1 / 3,
        "rejected_ratio": 1 / 2,
    }
    assert {name: values[name] for name in by_hand} == pytest.approx(by_hand, abs=1e-13)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("scale", [1e-8, 1e-6, 1e-4, 1e-2, 2.0])
def test_metrics_hold_at_the_scale_of_diffusion_log_ratios(level, scale):
    """In fp32, at 1e-4, k3 would be negative and variances zero.

    Rollout log-probs are of order 1.
    """
    source = torch.Generator().manual_seed(1)
    difference = scale * torch.randn(40, 3, generator=source, dtype=torch.float64)
    mask = torch.ones(40, 3, dtype=torch.bool)
    zero = torch.zeros_like(difference)
    rule = Rule(
        level, bands=(("token_k3", 0.0, scale), ("seq_mean_k1", math.exp(-scale), math.exp(scale)))
    )
    found = run(difference, zero, mask, rule).metrics.compute()
    expect = expected(difference, zero, mask, rule).metrics
    assert found["k3_kl"] > 0
    assert found == pytest.approx(expect, rel=1e-6, abs=scale**2 * 1e-6)
    size = "rollout_is_eff_sample_size"
    assert found[size] == pytest.approx(expect[size], rel=1e-12)


def test_the_largest_sequence_ratio_shown_is_e_to_the_20_and_the_smallest_has_no_bound():
    training = torch.tensor([[30.0, 30.0], [-30.0, 0.0]], dtype=torch.float64)
    mask = torch.ones(2, 2, dtype=torch.bool)
    values = run(training, torch.zeros_like(training), mask, Rule("sequence")).metrics.compute()
    assert values["rollout_is_max"] == pytest.approx(math.exp(20))
    assert values["rollout_is_min"] == pytest.approx(math.exp(-30), rel=1e-12)


@pytest.mark.parametrize("shape", [(0, 2), (2, 0), (0, 0), (2, 3)])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("criterion", ["token_k1", "seq_mean_k3", "seq_max_k2"])
def test_without_valid_steps_there_are_no_metrics(shape, level, criterion):
    nothing = torch.zeros(shape)
    found = compute_rollout_correction_and_rejection_mask(
        nothing,
        nothing + 1,
        nothing,
        rollout_is=level,
        rollout_rs=criterion,
        rollout_rs_threshold=2.0,
    )
    assert found.weights.shape == found.mask.shape == shape
    assert found.metrics == {}
