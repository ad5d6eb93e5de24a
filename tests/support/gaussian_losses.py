"""Steps of known Gaussians, for the losses that need the means of the policies."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from support.builders import diffusion_batch
from torch import Tensor
from torch.distributions import Normal

from flowgrpo_rc import RolloutCorrectionConfig, diffusion_loss
from flowgrpo_rc.batch import DiffusionBatch
from flowgrpo_rc.core.kl import gaussian_kl
from flowgrpo_rc.core.transition import GaussianSteps, log_prob, transition
from flowgrpo_rc.losses.config import DiffusionLossConfig, LossConfig

SIGMAS = [0.9, 0.7, 0.4, 0.2]
DECOUPLED = RolloutCorrectionConfig()
BYPASS = RolloutCorrectionConfig(bypass_mode=True)


class Steps(NamedTuple):
    """Three steps of six samples; velocities move by theta [B, T] along a direction; float64.

    The batch has the old policy's log-probs and means. The other fields are those of the formulas.
    """

    batch: DiffusionBatch
    old_mean: Tensor
    direction: Tensor
    following: Tensor
    std: Tensor
    dt: Tensor

    def now(self, theta: Tensor) -> tuple[Tensor, GaussianSteps]:
        """Computes log-probs and steps [B, T] of the policy at theta, as the policy does."""
        mean = self.mean(theta)
        rows = [
            (
                log_prob(step, self.following[:, t]),
                gaussian_kl(mean[:, t], self.old_mean[:, t], step.std),
            )
            for t in range(mean.shape[1])
            for step in [transition_of(mean[:, t], self.std[:, t])]
        ]
        log_probs, kl = (torch.stack(column, 1) for column in zip(*rows, strict=True))
        return log_probs, GaussianSteps(self.std, self.dt, kl)

    def mean(self, theta: Tensor) -> Tensor:
        return self.old_mean + theta[:, :, None, None] * self.direction


def transition_of(mean: Tensor, std: Tensor) -> Any:
    stock = transition(
        mean, mean, torch.ones(1) / 2, torch.ones(1) / 4, kind="cps", noise_level=0.5, sigma_max=1.0
    )
    return stock._replace(mean=mean, std=std[:, None, None])


def three_steps(kind: str = "sde", seed: int = 0) -> Steps:
    source = torch.Generator().manual_seed(seed)
    x, v, direction, noise = torch.randn(4, 6, 3, 2, 5, generator=source, dtype=torch.float64)
    means = []
    stds = []
    for t in range(3):
        sigma, sigma_next = (torch.full((6,), SIGMAS[t + i]).double() for i in (0, 1))
        step = transition(
            x[:, t], v[:, t], sigma, sigma_next, kind=kind, noise_level=0.7, sigma_max=0.95
        )
        means.append(step.mean)
        stds.append(step.std.flatten(1).expand(6, 1))
    mean = torch.stack(means, 1)
    std = torch.cat(stds, 1)
    following = mean + std[:, :, None, None] * noise
    old = Normal(mean, std[:, :, None, None]).log_prob(following).flatten(2).mean(2)
    advantages = torch.tensor([1.0, -1.0, 2.0, -0.5, 0.3, -2.0]).double().unsqueeze(1).expand(6, 3)
    batch = diffusion_batch(old, old_log_probs=old, advantages=advantages, prev_sample_mean=mean)
    dt = torch.tensor(SIGMAS).double().diff().expand(6, 3)
    return Steps(batch, mean, direction, following, std, dt)


def movement(scale: float = 0.05) -> Tensor:
    """Draws how far each step of each sample has moved; some are beyond the clip."""
    return scale * torch.randn(
        6, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64
    )


def loss_config_of(
    mode: str,
    correction: RolloutCorrectionConfig = DECOUPLED,
    clip: float = 0.01,
    **settings: float,
) -> LossConfig:
    return LossConfig(
        rollout_correction=correction,
        diffusion_loss=DiffusionLossConfig(loss_mode=mode, clip_ratio=clip, **settings),
    )


def value_and_gradient(
    settings: LossConfig, given: Steps, theta: Tensor, batch: DiffusionBatch | None = None
) -> tuple[float, Tensor, dict[str, float]]:
    theta = theta.clone().requires_grad_()
    log_probs, gaussian = given.now(theta)
    loss, metrics = diffusion_loss(
        settings, log_probs, given.batch if batch is None else batch, gaussian
    )
    loss.backward()
    return loss.item(), theta.grad, metrics.compute()
