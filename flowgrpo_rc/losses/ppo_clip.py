"""The PPO clip, on steps or tokens, what losses with it have in common, and PPO's of tokens."""

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from flowgrpo_rc.core.metrics import MetricBag, std_from_moments
from flowgrpo_rc.core.reduce import select
from flowgrpo_rc.correction.log_ratios import SAFETY_BOUND
from flowgrpo_rc.losses.base import DiffusionLoss, PolicyLoss, TokenLoss
from flowgrpo_rc.plugins import check_that


def ppo_clip(
    log_ratio: Tensor,
    advantages: Tensor,
    keep_mask: Tensor,
    *,
    clip_low: float | Tensor,
    clip_high: float | Tensor,
    dual_clip: float | Tensor | None = None,
) -> PolicyLoss:
    """Computes the clipped surrogate loss of each step.

        L = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)),   r = exp(log_ratio)

    With `dual_clip` c, L = min(L, -A c) where A < 0.

    Args:
      log_ratio: log-ratio of the current to the old policy, [B, T]. It is bounded to +-20 as the
        weights are: exp of a larger one would be inf in fp32, and its gradient nan.
      advantages: advantage of the sample that each step belongs to, [B, T].
      keep_mask: bool, [B, T]; steps outside it have loss 0 and no gradient, even where their
        log-ratio is infinite.
      clip_low: the ratio is clipped at 1 - clip_low; a number, or one for each step, [B, T].
      clip_high: the ratio is clipped at 1 + clip_high; likewise.
      dual_clip: upper bound on the ratio where the advantage is negative, above 1 + clip_high; a
        number, or one for each step, [B, T]; None for none.

    Returns:
      The loss of each step, [B, T], and the metrics ratio_mean, ratio_std, clip_fraction,
      clip_fraction_higher, clip_fraction_lower and, with `dual_clip`, dual_clip_fraction.

    See "Proximal Policy Optimization Algorithms", https://arxiv.org/abs/1707.06347, equation 7, and
    for the dual clip "Mastering Complex Control in MOBA Games with Deep Reinforcement Learning",
    https://arxiv.org/abs/1912.09729.
    """
    # Selected before the exponential: 0 * inf in its gradient would be nan.
    log_ratio = select(log_ratio, keep_mask).clamp(-SAFETY_BOUND, SAFETY_BOUND)
    ratio = torch.exp(log_ratio)
    clipped_ratio = ratio.clamp(1 - clip_low, 1 + clip_high)  # type: ignore[arg-type]
    # The pessimistic of the two: the clip removes a gain, never a loss.
    values = torch.maximum(-advantages * ratio, -advantages * clipped_ratio)

    metrics = ratio_metrics(log_ratio, keep_mask)
    if dual_clip is not None:
        # Only bad samples: their ratio may grow without a bound, and with it the loss.
        bounded = torch.minimum(values, -advantages * dual_clip)
        binds = (advantages < 0) & (bounded < values)
        metrics.mean("dual_clip_fraction", binds.double(), keep_mask)
        values = torch.where(advantages < 0, bounded, values)
    # By expm1, as the ratio's mean: an fp32 ratio has steps of 1e-7 about 1.
    deviation = torch.expm1(log_ratio.detach().double())
    higher = deviation > clip_high
    lower = deviation < -clip_low
    metrics.mean("clip_fraction", (higher | lower).double(), keep_mask)
    metrics.mean("clip_fraction_higher", higher.double(), keep_mask)
    metrics.mean("clip_fraction_lower", lower.double(), keep_mask)
    return PolicyLoss(select(values, keep_mask), metrics)


def ratio_metrics(log_ratio: Tensor, keep_mask: Tensor) -> MetricBag:
    """Computes mean and standard deviation of the ratio over the kept steps.

    The moments are those of exp(log_ratio) - 1 in float64: a ratio that differs from 1 by 1e-7
    keeps its digits.

    Args:
      log_ratio: log-ratio of the current to the old policy, [B, T]; finite.
      keep_mask: bool, the steps to take in, [B, T].

    Returns:
      The metrics ratio_mean and ratio_std.
    """
    metrics = MetricBag()
    deviation = torch.expm1(log_ratio.detach().double())
    metrics.mean("_deviation", deviation, keep_mask)
    metrics.mean("_deviation_square", deviation**2, keep_mask)
    metrics.derive("ratio_mean", ("_deviation",), lambda mean: 1 + mean)
    metrics.derive("ratio_std", ("_deviation", "_deviation_square"), std_from_moments)
    return metrics


@dataclass(frozen=True, kw_only=True)
class StepClip(DiffusionLoss):
    """A loss of denoising steps that is `ppo_clip` on some ratio of a step."""

    clip_ratio: float | Tensor  # of each step, [B, T], if it follows the mismatch
    # Where the advantage is negative, the ratio counts as at most 1 + dual_clip * clip_ratio.
    dual_clip: float | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for a `dual_clip` whose bound would lie inside of the band."""
        check_that(
            self.dual_clip is None or self.dual_clip > 1,
            f"dual_clip={self.dual_clip}: give a number above 1, in units of clip_ratio, or null "
            "for none",
        )

    def clipped(self, log_ratio: Tensor, advantages: Tensor, keep_mask: Tensor) -> PolicyLoss:
        """Computes the clipped loss of each step from its log-ratio; all are [B, T]."""
        return ppo_clip(
            log_ratio,
            advantages,
            keep_mask,
            clip_low=self.clip_ratio,
            clip_high=self.clip_ratio,
            dual_clip=None if self.dual_clip is None else 1 + self.dual_clip * self.clip_ratio,
        )


@dataclass(frozen=True, kw_only=True)
class TokenClip(TokenLoss):
    """A loss of tokens that is `ppo_clip` on some ratio of a token."""

    clip_ratio_low: float  # the ratio is clipped at 1 - clip_ratio_low
    clip_ratio_high: float  # the ratio is clipped at 1 + clip_ratio_high
    clip_ratio_c: float | None  # dual clip; None for none

    @abstractmethod
    def log_ratio(self, log_probs: Tensor, old_log_probs: Tensor, keep_mask: Tensor) -> Tensor:
        """Computes the log-ratio of each token, [B, T]; arguments as of a call."""

    def __call__(
        self, log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, keep_mask: Tensor
    ) -> PolicyLoss:
        """Computes the loss of each token; see `TokenLoss`."""
        return ppo_clip(
            self.log_ratio(log_probs, old_log_probs, keep_mask),
            advantages,
            keep_mask,
            clip_low=self.clip_ratio_low,
            clip_high=self.clip_ratio_high,
            dual_clip=self.clip_ratio_c,
        )


@dataclass(frozen=True, kw_only=True)
class PPOClip(TokenClip):
    """`ppo_clip` on the ratio of each token."""

    @property
    def clip_band(self) -> float:
        """The narrower half-width of the band."""
        return min(self.clip_ratio_low, self.clip_ratio_high)

    def log_ratio(self, log_probs: Tensor, old_log_probs: Tensor, keep_mask: Tensor) -> Tensor:
        """Computes the log-ratio of each token."""
        return log_probs - old_log_probs
