"""The metrics of the correction: their names, their values by hand, and their precision."""

import math

import pytest
import torch
from support.builders import expected, run
from support.oracles import LEVELS, Rule

from flowgrpo_rc import compute_rollout_correction_and_rejection_mask


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
    actual = run(difference, zero, mask, rule).metrics.compute()
    expect = expected(difference, zero, mask, rule).metrics
    assert actual["k3_kl"] > 0
    assert actual == pytest.approx(expect, rel=1e-6, abs=scale**2 * 1e-6)
    size = "rollout_is_eff_sample_size"
    assert actual[size] == pytest.approx(expect[size], rel=1e-12)


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
    actual = compute_rollout_correction_and_rejection_mask(
        nothing,
        nothing + 1,
        nothing,
        rollout_is=level,
        rollout_rs=criterion,
        rollout_rs_threshold=2.0,
    )
    assert actual.weights.shape == actual.mask.shape == shape
    assert actual.metrics == {}
