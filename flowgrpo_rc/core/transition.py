"""One reverse step of a flow as a Gaussian.

Legend: x [B, ...] the state, v [B, ...] the velocity that the model predicts, sigma and sigma_next
[B] the noise levels before and after the step (decreasing), dt = sigma_next - sigma < 0, D the
latent elements of a sample. All maths is fp32 (or the precision of the inputs, if higher). A step's
log-probability is the mean over D, as in every FlowGRPO system, so exp(difference) is the geometric
mean of D per-dimension ratios and not a density ratio.

Kinds:
    sde        FlowGRPO, arXiv 2505.05470
    cps        coefficients-preserving sampling, arXiv 2509.05952
    dance_sde  DanceGRPO, arXiv 2505.07818
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

KINDS = ("sde", "cps", "dance_sde")
CONVENTIONS = ("gaussian", "peers")


class Transition(NamedTuple):
    """The Gaussian of one reverse step: mean [B, ...] and std [B, 1, ...] (0 where the step is
    deterministic).
    """

    mean: Tensor
    std: Tensor


class GaussianSteps(NamedTuple):
    """What recorded steps say beside their log-probs, [B, T].

    std: standard deviation of a step, dt included; dt = sigma_next - sigma < 0; kl: exact KL, mean
    over D, between the policy whose means the batch holds and this one, differentiable in this one;
    None where the batch holds none.
    """

    std: Tensor
    dt: Tensor
    kl: Tensor | None


def transition(
    x: Tensor,
    v: Tensor,
    sigma: Tensor,
    sigma_next: Tensor,
    *,
    kind: str,
    noise_level: float,
    sigma_max: float | Tensor,
) -> Transition:
    """Mean and standard deviation of the next state.

    `sigma_max` is the second entry of the schedule; it stands for sigma where sigma is 1 and the
    `sde` diffusion coefficient would divide by zero. With noise_level 0, `sde` and `dance_sde` are
    the Euler step bit for bit, and `cps` is the same step up to rounding.
    """
    shape = (-1,) + (1,) * (x.ndim - 1)
    sigma, sigma_next = sigma.reshape(shape), sigma_next.reshape(shape)
    dt = sigma_next - sigma
    if kind == "sde":
        bounded = torch.where(
            sigma == 1, torch.as_tensor(sigma_max, dtype=sigma.dtype, device=sigma.device), sigma
        )
        s = noise_level * torch.sqrt(sigma / (1 - bounded))
        drift = s**2 / (2 * sigma)
        return Transition(
            x * (1 + drift * dt) + v * (1 + drift * (1 - sigma)) * dt, s * torch.sqrt(-dt)
        )
    if kind == "dance_sde":
        x0 = x - sigma * v
        score_term = 0.5 * noise_level**2 * (x - x0 * (1 - sigma)) / sigma**2
        return Transition(x + v * dt + score_term * dt, noise_level * torch.sqrt(-dt))
    if kind == "cps":
        std = sigma_next * math.sin(noise_level * math.pi / 2)
        x0, x1 = x - sigma * v, x + (1 - sigma) * v
        return Transition(x0 * (1 - sigma_next) + x1 * torch.sqrt(sigma_next**2 - std**2), std)
    raise ValueError(
        f"unknown sde_type {kind!r}; allowed are {', '.join(KINDS)} (rollout.algo.sde_type)"
    )


def sample(step: Transition, noise: Tensor) -> Tensor:
    """mean + std * noise, for standard normal noise [B, ...]."""
    return step.mean + step.std * noise


def log_prob(step: Transition, x_next: Tensor, *, convention: str = "gaussian") -> Tensor:
    """Mean over D of the log-density of `x_next` [B, ...] -> [B].

    `gaussian` is the density. `peers` is -(x_next - mean)^2 alone, which is what other systems call
    the
    log-probability of a cps step: 2 std^2 times smaller and without normaliser, so that clip ranges
    and bands do not transfer between the two. A step with std = 0 has no density and must not be
    trained (`schedule.window_bounds` keeps it out): `gaussian` gives inf or nan there, `peers`
    stays finite and hides it.
    """
    error = (x_next - step.mean) ** 2
    if convention == "peers":
        return -error.flatten(1).mean(1)
    density = -error / (2 * step.std**2) - torch.log(step.std) - 0.5 * math.log(2 * math.pi)
    return density.flatten(1).mean(1)


def reference_kl(
    step: Transition, reference_mean: Tensor, sigma: Tensor, sigma_next: Tensor, *, kind: str
) -> Tensor:
    """mean_D[(mean - reference_mean)^2] / (2 s^2) -> [B], the penalty of FlowGRPO; differentiable
    in step.mean.

    s is the diffusion coefficient: the step's standard deviation without sqrt(-dt) for `sde` and
    `dance_sde` (the papers leave dt out), the standard deviation itself for `cps`.
    """
    scale = step.std.flatten(1)[:, 0]
    if kind != "cps":
        scale = scale / torch.sqrt(sigma - sigma_next)
    return ((step.mean - reference_mean) ** 2).flatten(1).mean(1) / (2 * scale**2)
