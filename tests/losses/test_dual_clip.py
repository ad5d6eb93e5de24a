"""The dual clip of images: value and slope against the formula written anew, in float64."""

import numpy as np
import pytest
import torch

from flowgrpo_rc import DiffusionLossConfig
from flowgrpo_rc.core.transition import GaussianSteps

BAND = 1e-3
# log-ratios about both edges of the band, and below and above 1 + 4 bands
LOG_RATIOS = (-2e-2, -2e-3, -5e-4, 0.0, 5e-4, 2e-3, 3.9e-3, 4.1e-3, 2e-2)


def expected(log_ratio: float, advantage: float, dual: float | None) -> tuple[float, float]:
    """Returns value and slope of max(-A r, -A clip(r)), below -A c where A < 0."""
    ratio = np.exp(np.float64(log_ratio))
    clipped = min(max(ratio, 1 - BAND), 1 + BAND)
    value, slope = -advantage * ratio, -advantage * ratio
    if -advantage * clipped > value:
        value, slope = -advantage * clipped, 0.0
    if advantage < 0 and dual is not None and -advantage * (1 + dual * BAND) < value:
        value, slope = -advantage * (1 + dual * BAND), 0.0
    return value, slope


@pytest.mark.parametrize("mode", ["flow_grpo", "grpo_guard"])
@pytest.mark.parametrize("dual", [None, 4.0])
@pytest.mark.parametrize("by_step", [False, True])
def test_value_and_slope(mode: str, dual: float | None, by_step: bool) -> None:
    section = DiffusionLossConfig(
        loss_mode=mode,
        clip_ratio="auto:4" if by_step else BAND,
        options={} if dual is None else {"dual_clip": dual},
    )
    advantages = torch.tensor([[1.5], [-0.5]], dtype=torch.float64).expand(2, len(LOG_RATIOS))
    log_probs = torch.tensor(LOG_RATIOS, dtype=torch.float64).repeat(2, 1).requires_grad_()
    one = torch.ones_like(log_probs).detach()
    loss = section.bounded(section.loss(), BAND * one) if by_step else section.loss()
    actual = loss(log_probs, 0 * one, advantages, one.bool(), GaussianSteps(one, -one, 0 * one))
    actual.values.sum().backward()
    wanted = [
        [expected(log_ratio, advantage, dual) for log_ratio in LOG_RATIOS]
        for advantage in (1.5, -0.5)
    ]
    values, slopes = torch.tensor(wanted, dtype=torch.float64).unbind(2)
    torch.testing.assert_close(actual.values, values, rtol=1e-14, atol=0)
    assert log_probs.grad is not None
    torch.testing.assert_close(log_probs.grad, slopes, rtol=1e-14, atol=0)
    metrics = actual.metrics.compute()
    if dual is None:
        assert "dual_clip_fraction" not in metrics
    else:
        assert metrics["dual_clip_fraction"] == 2 / 18


@pytest.mark.parametrize("value", [1.0, 0.0, -3.0])
def test_a_bound_inside_of_the_band_is_refused(value: float) -> None:
    section = DiffusionLossConfig(options={"dual_clip": value})
    with pytest.raises(ValueError, match=r"actor.diffusion_loss: dual_clip=.* above 1"):
        section.validate()
