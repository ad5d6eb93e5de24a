"""Settings and contracts of the policy losses."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from flowgrpo_rc.core.metrics import MetricBag
from flowgrpo_rc.core.reduce import AllReduce, identity
from flowgrpo_rc.correction.config import RolloutCorrectionConfig
from flowgrpo_rc.correction.correct import normalisation
from flowgrpo_rc.plugins import load_function

DIFFUSION_KEY = "actor.diffusion_loss"
TOKEN_KEY = "actor.token_loss"
DIFFUSION_LOSSES = ("flow_grpo", "grpo_guard", "flow_dppo")
TOKEN_LOSSES = ("ppo_clip", "gspo")
MEANS_LOSSES = (
    "grpo_guard",
    "flow_dppo",
)  # of DIFFUSION_LOSSES: they compare the means of the steps
AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")


@dataclass(kw_only=True)
class DiffusionLossConfig:
    """The loss of images, under `loss_type=ppo_clip`.

    loss_mode: PPO's clip on the mean-pooled ratio, GRPO-Guard's on its own, or Flow-DPPO's bound on
        the divergence; or a function (`CustomLoss`).
    clip_ratio: half-width of the PPO band of flow_grpo (on the mean-pooled ratio) and grpo_guard
        (on its own); a function of yours reads it, too.
    adv_clip_max: advantages are clipped to +- this.
    kl_threshold: up to this KL of a step, mean over D, flow_dppo lets every update pass.
    """

    loss_mode: str = "flow_grpo"
    clip_ratio: float = 1e-4
    adv_clip_max: float = 5.0
    kl_threshold: float = 1e-5

    @property
    def needs_means(self) -> bool:
        """Whether it compares the means of the current steps with those of the old policy's."""
        return self.loss_mode in MEANS_LOSSES

    def validate(self) -> None:
        if (
            custom_loss(DIFFUSION_KEY, self.loss_mode) is None
            and self.loss_mode not in DIFFUSION_LOSSES
        ):
            raise ValueError(
                f"{DIFFUSION_KEY}.loss_mode={self.loss_mode!r}: {_allowed(DIFFUSION_LOSSES)}"
            )
        if not 0 < self.kl_threshold < math.inf:
            raise ValueError(
                f"{DIFFUSION_KEY}.kl_threshold={self.kl_threshold}: give a number above 0"
            )
        if self.kl_threshold != DiffusionLossConfig.kl_threshold and self.loss_mode != "flow_dppo":
            raise ValueError(
                f"{DIFFUSION_KEY}.kl_threshold={self.kl_threshold} has no effect with "
                f"{DIFFUSION_KEY}.loss_mode="
                f"{self.loss_mode}: drop it, or set loss_mode=flow_dppo"
            )
        if not 0 < self.clip_ratio < 1:
            raise ValueError(
                f"{DIFFUSION_KEY}.clip_ratio={self.clip_ratio}: give a number between 0 and 1"
            )
        if self.clip_ratio != DiffusionLossConfig.clip_ratio and self.loss_mode == "flow_dppo":
            raise ValueError(
                f"{DIFFUSION_KEY}.clip_ratio={self.clip_ratio} has no effect with "
                f"{DIFFUSION_KEY}.loss_mode=flow_dppo, "
                "which has kl_threshold in its place: drop it (its default is "
                f"{DiffusionLossConfig.clip_ratio:g})"
            )
        if not self.adv_clip_max > 0:
            raise ValueError(
                f"{DIFFUSION_KEY}.adv_clip_max={self.adv_clip_max}: give a number above 0"
            )


@dataclass(kw_only=True)
class TokenLossConfig:
    """The loss of text, under `loss_type=ppo_clip`.

    loss_mode: `ppo_clip`, `gspo` (one ratio for the sequence), or a function (`CustomLoss`).
    clip_ratio_low: the ratio stays above 1 - this.
    clip_ratio_high: the ratio stays below 1 + this.
    clip_ratio_c: dual clip, an upper bound above 1 on the ratio where the advantage is negative;
        null for none.
    loss_agg_mode: `token-mean`, `seq-mean-token-sum` (Dr.GRPO's, up to a constant) or
        `seq-mean-token-mean` (GRPO's).
    """

    loss_mode: str = "ppo_clip"
    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    clip_ratio_c: float | None = 3.0
    loss_agg_mode: str = "token-mean"

    def validate(self) -> None:
        if custom_loss(TOKEN_KEY, self.loss_mode) is None and self.loss_mode not in TOKEN_LOSSES:
            raise ValueError(f"{TOKEN_KEY}.loss_mode={self.loss_mode!r}: {_allowed(TOKEN_LOSSES)}")
        if self.loss_agg_mode not in AGGREGATIONS:
            raise ValueError(
                f"{TOKEN_KEY}.loss_agg_mode={self.loss_agg_mode!r}: allowed are "
                f"{', '.join(AGGREGATIONS)}"
            )
        if not 0 < self.clip_ratio_low < 1 or not self.clip_ratio_high > 0:
            raise ValueError(
                f"{TOKEN_KEY}.clip_ratio_low={self.clip_ratio_low}, {TOKEN_KEY}.clip_ratio_high="
                f"{self.clip_ratio_high}: give numbers above 0, the lower one below 1"
            )
        if self.clip_ratio_c is not None and not self.clip_ratio_c > 1 + self.clip_ratio_high:
            raise ValueError(
                f"{TOKEN_KEY}.clip_ratio_c={self.clip_ratio_c}: give more than 1 + "
                "clip_ratio_high, or null for none"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class LossConfig:
    """What `diffusion_loss` and `token_loss` read: the actor's loss settings and the one rollout
    correction.
    """

    rollout_correction: RolloutCorrectionConfig
    diffusion_loss: DiffusionLossConfig = field(default_factory=DiffusionLossConfig)
    token_loss: TokenLossConfig = field(default_factory=TokenLossConfig)


class PolicyLoss(NamedTuple):
    """values [B, T]: loss of each step before weights and mean, 0 where not kept; metrics: names
    without prefix.
    """

    values: Tensor
    metrics: MetricBag


# (log_probs, old_log_probs, advantages, kept), all [B, T] -> the loss of each step.
StepLoss = Callable[[Tensor, Tensor, Tensor, Tensor], PolicyLoss]


class CustomLoss(Protocol):
    """What `loss_mode=my_module:function` names: a `StepLoss` that is told the section of the
    configuration, too.

    Steps that are not `kept` must have the value 0 and no gradient, by selection
    (`core.reduce.select`): their log-probs may be infinite. Weights and rejection of the rollout
    correction are applied outside.
    """

    def __call__(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        kept: Tensor,
        settings: Any,
    ) -> PolicyLoss: ...


def custom_loss(key: str, loss_mode: str) -> CustomLoss | None:
    """The function that a loss_mode with a colon names, None for another. ValueError if there is no
    such function.
    """
    if ":" not in loss_mode:
        return None
    try:
        return load_function(loss_mode)
    except ValueError as error:
        raise ValueError(f"{key}.loss_mode: {error}") from error


def _allowed(names: tuple[str, ...]) -> str:
    return f"allowed are {', '.join(names)}, or my_module:function for a loss of your own"


class LossTerms(NamedTuple):
    """A loss that adds up over micro-batches and processes: sum the totals, and divide once by the
    denominator.

    total: scalar, differentiable; share [B, T]: how much a step counts in it; number: of the steps
    or sequences it is the sum of, float64;
    weight_total and weight_count: parts of the mean weight where the weights are still to be
    normalised;
    kept [B, T] bool, weights [B, T] or None: the steps that were not rejected, and what they are
    multiplied by.
    """

    total: Tensor
    share: Tensor
    number: Tensor
    weight_total: Tensor
    weight_count: Tensor
    metrics: MetricBag
    kept: Tensor
    weights: Tensor | None

    def parts(self) -> Tensor:
        """What the denominator follows from [3] float64; adds up over micro-batches and
        processes.
        """
        return torch.stack([self.number, self.weight_total, self.weight_count])


def denominator(parts: Tensor, all_reduce: AllReduce = identity) -> Tensor:
    """Of all processes, float64; 1 where nothing counts, so that the loss is 0 there."""
    number, weight_total, weight_count = all_reduce(parts)
    mean_weight = torch.where(
        weight_count > 0, normalisation(weight_total, weight_count), torch.ones_like(number)
    )
    return torch.where(number > 0, number * mean_weight, torch.ones_like(number))
