"""DiffusionNFT: learns from good and bad samples by flow matching, without log-probs."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flowgrpo_rc.core.metrics import MetricBag
from flowgrpo_rc.losses.base import ForwardLoss, PolicyLoss, Velocities
from flowgrpo_rc.plugins import check_least, check_that

SMALLEST_ERROR = 1e-5  # of the adaptive weight, as published


@dataclass(frozen=True, kw_only=True)
class DiffusionNFT(ForwardLoss):
    """Pulls the policy to good samples, and an implicit negative policy to bad ones.

        v+ = (1 - beta) v_old + beta v,   v- = (1 + beta) v_old - beta v,   r = (1 + A) / 2
        L = (r d(v+) + (1 - r) d(v-)) / beta
        d(u) = mean_D[(sigma (target - u))^2] / sg(mean_D[|sigma (target - u)|])

    sigma (target - u) is the error of the clean sample that u predicts from x_t. sg stops the
    gradient: the weight makes errors of all noise levels count alike.

    See "DiffusionNFT: Online Diffusion Reinforcement with Forward Process",
    https://arxiv.org/abs/2509.16117, algorithm 1 and section 3.3; the factor 1 / beta and the decay
    are those of its published code.
    """

    beta: float = 1.0  # how far the two policies lie from the old one, in units of v - v_old
    times: int | None = None  # as in `ForwardLoss`
    old_decay_rate: float = 0.001  # by which the old policy keeps more of itself in every update
    old_decay_max: float = 0.5  # the most that it keeps
    old_decay_start: int = 0  # updates before that, in which it keeps nothing of itself
    old_interval: int = 1  # it stays as it is unless the updates so far are a multiple of this

    def __post_init__(self) -> None:
        """Raises ValueError for a wrong option."""
        check_that(0 < self.beta < math.inf, f"beta={self.beta}: give a number above 0")
        check_least("times", self.times, 1)
        for name in ("old_decay_rate", "old_decay_max", "old_decay_start"):
            check_least(name, vars(self)[name], 0)
        check_that(self.old_decay_max < 1, f"old_decay_max={self.old_decay_max}: give less than 1")
        check_least("old_interval", self.old_interval, 1)

    def __call__(self, velocities: Velocities, advantages: Tensor) -> PolicyLoss:
        """Computes the loss of each sample and noise level; see `ForwardLoss`."""
        optimality = (1 + advantages) / 2
        difference = velocities.current - velocities.old
        # Both policies from v_old, so that their errors agree to the last bit where v = v_old.
        error = velocities.target - velocities.old
        positive = _distance(error - self.beta * difference, velocities.sigma)
        negative = _distance(error + self.beta * difference, velocities.sigma)
        # Over beta, so that the slope at v = v_old does not depend on it.
        values = (optimality * positive + (1 - optimality) * negative) / self.beta
        metrics = MetricBag()
        metrics.mean("positive_loss", positive)
        metrics.mean("negative_loss", negative)
        metrics.mean("old_deviation", difference.detach().square().flatten(2).mean(2))
        return PolicyLoss(values, metrics)

    def old_decay(self, updates: int) -> float:
        """Returns how much of itself the old policy keeps; see `ForwardLoss`."""
        if updates % self.old_interval:
            return 1.0
        rising = self.old_decay_rate * max(updates - self.old_decay_start, 0)
        return min(rising, self.old_decay_max)


def _distance(error: Tensor, sigma: Tensor) -> Tensor:
    """Computes the weighted error of the predicted clean sample, [b, t]."""
    clean_error = error.flatten(2) * sigma.unsqueeze(2)
    # float64: the loss is divided by this mean over D elements.
    size = clean_error.detach().double().abs().mean(2).clamp(min=SMALLEST_ERROR)
    return clean_error.square().mean(2) / size.to(torch.promote_types(error.dtype, torch.float32))
