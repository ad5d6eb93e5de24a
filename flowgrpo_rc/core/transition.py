"""One reverse step of a flow as a Gaussian: its mean, its density, its divergence from another.

Legend:
    B           samples
    x           [B, ...], the state; D latent elements of one sample
    v           [B, ...], the velocity that the model predicts
    sigma       [B], the noise level before the step: 1 is pure noise, 0 the image
    sigma_next  [B], the noise level after the step, below sigma
    dt          sigma_next - sigma, below 0

All maths is in fp32, or in the precision of the inputs if that is higher. The log-probability of a
step is a mean over D, as in every FlowGRPO system. So exp(difference of two) is the geometric mean
of D ratios, one per element, and not a density ratio.

The kinds of step, `sde_type` in the configuration:
    sde        FlowGRPO, https://arxiv.org/abs/2505.05470
    cps        coefficients-preserving sampling, https://arxiv.org/abs/2509.05952
    dance_sde  DanceGRPO, https://arxiv.org/abs/2505.07818
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

KINDS = ("sde", "cps", "dance_sde")
CONVENTIONS = ("gaussian", "peers")


class Transition(NamedTuple):
    """The Gaussian that the next state of a reverse step is drawn from."""

    mean: Tensor  # [B, ...]
    std: Tensor  # dt included, [B, 1, ...]; 0 where the step is deterministic


class GaussianSteps(NamedTuple):
    """Facts about recorded Gaussian steps that their log-probs do not hold; all [B, T]."""

    std: Tensor  # of each step, dt included
    dt: Tensor  # sigma_next - sigma, below 0
    # Exact KL, mean over D, between the old policy and this policy; differentiable in this one. The
    # old policy is the rollout's if the batch holds the means of no other. None without any means.
    kl: Tensor | None
    # `centered_log_ratio` of this policy to the rollout, likewise differentiable, if its means are
    # there.
    centered: Tensor | None = None

    def detached(self) -> "GaussianSteps":
        """Returns the same facts without gradient."""
        kl = None if self.kl is None else self.kl.detach()
        centered = None if self.centered is None else self.centered.detach()
        return self._replace(kl=kl, centered=centered)


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
    """Computes the Gaussian of the next state.

    With eta = noise_level, x0 = x - sigma v (the predicted image) and x1 = x + (1 - sigma) v (the
    predicted noise):

        sde        s    = eta sqrt(sigma / (1 - sigma)),   std = s sqrt(-dt)
                   mean = x + v dt + s^2 / (2 sigma) (x + (1 - sigma) v) dt
        dance_sde  std  = eta sqrt(-dt)
                   mean = x + v dt + eta^2 / 2 (x - (1 - sigma) x0) / sigma^2 dt
        cps        std  = sigma_next sin(eta pi / 2)
                   mean = (1 - sigma_next) x0 + sqrt(sigma_next^2 - std^2) x1

    With noise level 0, `sde` and `dance_sde` are the Euler step bit for bit; `cps` is the same step
    up to rounding.

    Args:
      x: the state, [B, ...].
      v: the velocity at x, [B, ...].
      sigma: the noise level before the step, [B].
      sigma_next: the noise level after the step, [B].
      kind: `sde`, `dance_sde` or `cps`.
      noise_level: scale of the noise, eta; 0 for a deterministic step.
      sigma_max: the second entry of the schedule. In the s of `sde` it takes the place of sigma
        where sigma is 1 and the formula divides by zero.

    Returns:
      The Gaussian of the next state.

    Raises:
      ValueError: the kind is unknown.

    See "Flow-GRPO", https://arxiv.org/abs/2505.05470, section 4.2 (`sde`); "Coefficients-Preserving
    Sampling for Reinforcement Learning with Flow Matching", https://arxiv.org/abs/2509.05952
    (`cps`); and "DanceGRPO", https://arxiv.org/abs/2505.07818 (`dance_sde`).
    """
    if kind not in KINDS:
        raise ValueError(
            f"unknown sde_type {kind!r}; allowed are {', '.join(KINDS)} (rollout.algo.sde_type)"
        )
    one_per_sample = (-1,) + (1,) * (x.ndim - 1)
    sigma = sigma.reshape(one_per_sample)
    sigma_next = sigma_next.reshape(one_per_sample)
    dt = sigma_next - sigma
    if kind == "sde":
        largest = torch.as_tensor(sigma_max, dtype=sigma.dtype, device=sigma.device)
        # At sigma 1 the formula divides by zero: the next entry of the schedule takes its place.
        below_one = torch.where(sigma == 1, largest, sigma)
        s = noise_level * torch.sqrt(sigma / (1 - below_one))
        drift = s**2 / (2 * sigma)
        # The terms are grouped by x and v, so that s = 0 leaves exactly x + v dt.
        mean = x * (1 + drift * dt) + v * (1 + drift * (1 - sigma)) * dt
        return Transition(mean, s * torch.sqrt(-dt))
    x0 = x - sigma * v
    if kind == "dance_sde":
        # The score by way of the predicted image, as in the published code.
        score_term = 0.5 * noise_level**2 * (x - x0 * (1 - sigma)) / sigma**2
        mean = x + v * dt + score_term * dt
        return Transition(mean, noise_level * torch.sqrt(-dt))
    std = sigma_next * math.sin(noise_level * math.pi / 2)
    x1 = x + (1 - sigma) * v
    mean = x0 * (1 - sigma_next) + x1 * torch.sqrt(sigma_next**2 - std**2)
    return Transition(mean, std)


def sample(step: Transition, noise: Tensor) -> Tensor:
    """Computes the next state from given noise.

        x_next = mean + std noise

    Args:
      step: the Gaussian of the next state.
      noise: standard normal, [B, ...].

    Returns:
      The next state, [B, ...].
    """
    return step.mean + step.std * noise


def log_prob(step: Transition, x_next: Tensor, *, convention: str = "gaussian") -> Tensor:
    """Computes the log-probability of the next state, as a mean over its D elements.

        gaussian  mean_D[-(x_next - mean)^2 / (2 std^2) - log(std) - log(2 pi) / 2]
        peers     mean_D[-(x_next - mean)^2]

    `gaussian` is the log-density. `peers` is what other systems call the log-probability of a `cps`
    step: it lacks the factor 1 / (2 std^2) and the normaliser, so clip ranges and bands made for
    one do not fit the other.

    A step with std = 0 has no density and must not be trained; `schedule.window_bounds` keeps it
    out. Here `gaussian` gives inf or nan, while `peers` stays finite and hides the mistake.

    Args:
      step: the Gaussian of the next state.
      x_next: the next state, [B, ...].
      convention: `gaussian` or `peers`.

    Returns:
      The mean over D of the log-density, [B], in nats per element.

    See "Flow-GRPO", https://arxiv.org/abs/2505.05470, section 4.
    """
    error = (x_next - step.mean) ** 2
    if convention == "peers":
        return -error.flatten(1).mean(1)
    # The mean over D gives latents of every size one scale, and so one clip.
    density = -error / (2 * step.std**2) - torch.log(step.std) - 0.5 * math.log(2 * math.pi)
    return density.flatten(1).mean(1)


def centered_log_ratio(
    step: Transition, rollout_mean: Tensor, x_next: Tensor, *, convention: str = "gaussian"
) -> Tensor:
    """Computes the log-ratio to the rollout that credits the noise which the rollout drew.

    With the rollout's step x_next = rollout_mean + std e and d = mean - rollout_mean:

        gaussian  mean_D[e d] / std
        peers     2 mean_D[std e d]

    It is the difference of the log-probs plus what the difference loses in expectation over e:

        gaussian  log_prob - rollout_log_prob = mean_D[e d] / std - mean_D[d^2] / (2 std^2)
        peers     log_prob - rollout_log_prob = 2 mean_D[std e d] - mean_D[d^2]

    So its expectation over the rollout's noise is 0, however far the two means are apart. Its
    gradient, e / std times that of the mean, is the score at the rollout's mean. The difference of
    log-probs has e - d / std in place of e: the noise that would have led to x_next from our mean.

    It is computed as an inner product, and so has the relative precision of d. A difference of
    log-probs has the absolute precision of the log-probs.

    Args:
      step: the Gaussian of the current policy.
      rollout_mean: mean of the same step under the policy that drew x_next, [B, ...].
      x_next: the next state, as the rollout drew it, [B, ...].
      convention: of the log-probs, `gaussian` or `peers`.

    Returns:
      The centered log-ratio per element, [B]; differentiable in step.mean. 0 where the means agree.
    """
    # One inner product in place of a difference of two log-probs, which would cancel.
    product = (x_next - rollout_mean) * (step.mean - rollout_mean)
    if convention == "peers":
        return 2 * product.flatten(1).mean(1)
    return (product / step.std**2).flatten(1).mean(1)


def reference_kl(
    step: Transition, reference_mean: Tensor, sigma: Tensor, sigma_next: Tensor, *, kind: str
) -> Tensor:
    """Computes the KL penalty of a step against a reference policy, as FlowGRPO scales it.

        KL = mean_D[(mean - reference_mean)^2] / (2 s^2)

    s is the diffusion coefficient. For `sde` and `dance_sde` it is the standard deviation of the
    step without its factor sqrt(-dt), since the papers leave dt out. For `cps` it is the standard
    deviation itself. `kl.gaussian_kl` is the exact divergence, with dt.

    Args:
      step: the Gaussian of the current policy.
      reference_mean: mean of the same step under the reference policy, [B, ...].
      sigma: the noise level before the step, [B].
      sigma_next: the noise level after the step, [B].
      kind: `sde`, `dance_sde` or `cps`.

    Returns:
      The penalty per element, [B], in nats; differentiable in step.mean.

    See "Flow-GRPO", https://arxiv.org/abs/2505.05470, section 4.2.
    """
    # The standard deviation is one number a sample: any element of it will do.
    scale = step.std.flatten(1)[:, 0]
    if kind != "cps":
        scale = scale / torch.sqrt(sigma - sigma_next)
    squared_error = ((step.mean - reference_mean) ** 2).flatten(1).mean(1)
    return squared_error / (2 * scale**2)
