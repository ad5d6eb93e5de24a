"""Flow-DPPO: the exact divergence of a step decides which updates pass."""

from __future__ import annotations

import pytest
import torch
from support.builders import loss_config
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
from flowgrpo_rc.algorithms.policy_gradient.images import DiffusionObjective
from flowgrpo_rc.core.transition import GaussianSteps


def parts(given: Steps, theta: Tensor, b: int, t: int) -> tuple[Tensor, float]:
    """Returns the ratio of the mean-pooled density and the exact KL(old | now), mean over D."""
    std = given.std[b, t]
    old = Normal(given.old_mean[b, t], std)
    now = Normal(given.mean(theta)[b, t], std)
    following = given.following[b, t]
    ratio = torch.exp((now.log_prob(following) - old.log_prob(following)).mean())
    return ratio, kl_divergence(old, now).mean().item()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("correction", [DECOUPLED, BYPASS], ids=["decoupled", "bypass"])
def test_loss_and_gradient_are_those_of_the_definition(
    kind: str, correction: RolloutCorrectionConfig
) -> None:
    given = three_steps(kind)
    theta = movement(0.2)
    leaf = theta.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    threshold = sorted(parts(given, theta, b, t)[1] for b in range(6) for t in range(3))[6]
    masked = above = 0
    for b in range(6):
        for t in range(3):
            (ratio, kl) = parts(given, leaf, b, t)
            a = given.batch.advantages[b, t].item()
            further_away = (a > 0 and ratio > 1) or (a < 0 and ratio < 1)
            above += kl > threshold
            if kl > threshold and further_away:
                masked += 1
            else:
                total = total - a * ratio / 18
    value, gradient, metrics = value_and_gradient(
        loss_config_of("flow_dppo", correction, kl_threshold=threshold * (1 + 1e-9)), given, theta
    )
    (expect,) = torch.autograd.grad(total, leaf)
    assert value == pytest.approx(total.item(), rel=1e-12)
    torch.testing.assert_close(gradient, expect, rtol=1e-9, atol=1e-13)
    assert 0 < masked < above
    assert metrics["clip_fraction"] == masked / 18
    assert metrics["kl_above_threshold_fraction"] == above / 18
    assert torch.count_nonzero(gradient) == 18 - masked


def one_step(advantage: float, log_ratio: float, kl: float) -> Tensor:
    """Returns the slope of the loss in the log-prob of one step, with a threshold of 1e-3."""
    given = three_steps()
    batch = given.batch.rows(0, 1).step(0)
    batch = batch.replace(advantages=torch.full((1, 1), advantage).double())
    leaf = (batch.old_log_probs + log_ratio).requires_grad_()
    one = torch.ones(1, 1).double()
    gaussian = GaussianSteps(one, -one, kl * one)
    DiffusionObjective(loss_config_of("flow_dppo", kl_threshold=1e-3)).terms(
        leaf, batch, gaussian
    ).total.backward()
    return leaf.grad


@pytest.mark.parametrize(
    ("advantage", "log_ratio"), [(1.0, 0.3), (1.0, -0.3), (-1.0, 0.3), (-1.0, -0.3), (1.0, 2.0)]
)
def test_a_step_is_masked_if_it_moves_away_and_is_beyond_the_threshold(
    advantage: float, log_ratio: float
) -> None:
    """A noisy ratio far outside of any PPO band passes as long as the step itself is near."""
    slope = -advantage * torch.tensor(log_ratio, dtype=torch.float64).exp()
    for kl, passes in (
        (0.0, True),
        (1e-3, True),
        (1.001e-3, advantage * log_ratio < 0),
        (9.0, advantage * log_ratio < 0),
    ):
        expect = slope if passes else torch.zeros(())
        assert one_step(advantage, log_ratio, kl).item() == pytest.approx(expect.item(), rel=1e-12)


def test_the_default_loss_does_not_need_the_means() -> None:
    given = three_steps()
    log_probs, gaussian = given.now(movement())
    one, two = (
        DiffusionObjective(loss_config(BYPASS)).terms(log_probs, given.batch, g).total
        for g in (None, gaussian)
    )
    assert torch.equal(one, two)
