"""Flow-DPPO: the exact divergence of a step decides which updates pass."""

import pytest
import torch
from support.gaussian_losses import (
    BYPASS,
    DECOUPLED,
    Steps,
    loss_config_of,
    movement,
    three_steps,
    value_and_gradient,
)
from support.image_rollouts import KINDS
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from flowgrpo_rc import RolloutCorrectionConfig


def parts(case: Steps, theta: Tensor, b: int, t: int) -> tuple[Tensor, float]:
    """Returns the ratio of the mean-pooled density and the exact KL(old | now), mean over D."""
    std = case.std[b, t]
    old = Normal(case.old_mean[b, t], std)
    now = Normal(case.mean(theta)[b, t], std)
    following = case.following[b, t]
    ratio = torch.exp((now.log_prob(following) - old.log_prob(following)).mean())
    return ratio, kl_divergence(old, now).mean().item()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("correction", [DECOUPLED, BYPASS], ids=["decoupled", "bypass"])
def test_loss_and_gradient_are_those_of_the_definition(
    kind: str, correction: RolloutCorrectionConfig
) -> None:
    case = three_steps(kind)
    theta = movement(0.2)
    leaf = theta.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    threshold = sorted(parts(case, theta, b, t)[1] for b in range(6) for t in range(3))[6]
    masked = above = 0
    for b in range(6):
        for t in range(3):
            (ratio, kl) = parts(case, leaf, b, t)
            a = case.batch.advantages[b, t].item()
            further_away = (a > 0 and ratio > 1) or (a < 0 and ratio < 1)
            above += kl > threshold
            if kl > threshold and further_away:
                masked += 1
            else:
                total = total - a * ratio / 18
    value, gradient, metrics = value_and_gradient(
        loss_config_of("flow_dppo", correction, kl_threshold=threshold * (1 + 1e-9)), case, theta
    )
    (expect,) = torch.autograd.grad(total, leaf)
    assert value == pytest.approx(total.item(), rel=1e-12)
    torch.testing.assert_close(gradient, expect, rtol=1e-9, atol=1e-13)
    assert 0 < masked < above
    assert metrics["clip_fraction"] == masked / 18
    assert metrics["kl_above_threshold_fraction"] == above / 18
    assert torch.count_nonzero(gradient) == 18 - masked
