"""The loss of tokens."""

from __future__ import annotations

from torch import Tensor

from flowgrpo_rc.batch import TokenBatch
from flowgrpo_rc.core.metrics import MetricBag
from flowgrpo_rc.losses.base import (
    TOKEN_KEY,
    LossConfig,
    LossTerms,
    PolicyLoss,
    custom_loss,
    denominator,
)
from flowgrpo_rc.losses.policy import loss_terms
from flowgrpo_rc.losses.ppo_clip import ppo_clip, sequence_log_ratio


def token_terms(config: LossConfig, log_probs: Tensor, batch: TokenBatch) -> LossTerms:
    """`loss_terms` of GRPO for log-probs [B, T] of whole responses; rejected tokens leave the mean,
    as the documents for language models have it."""
    settings = config.token_loss
    own = custom_loss(TOKEN_KEY, settings.loss_mode)

    def step_loss(
        log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, kept: Tensor
    ) -> PolicyLoss:
        if own is not None:
            return own(log_probs, old_log_probs, advantages, kept, settings)
        log_ratio = log_probs - old_log_probs
        if settings.loss_mode == "gspo":
            log_ratio = sequence_log_ratio(log_probs, old_log_probs, kept)
        low, high = settings.clip_ratio_low, settings.clip_ratio_high
        return ppo_clip(log_ratio, advantages, kept, low=low, high=high, dual=settings.clip_ratio_c)

    aggregation, correction = settings.loss_agg_mode, config.rollout_correction
    return loss_terms(
        correction, step_loss, log_probs, batch, aggregation=aggregation, normalize="kept"
    )


def token_loss(
    config: LossConfig, log_probs: Tensor, batch: TokenBatch
) -> tuple[Tensor, MetricBag]:
    """Loss (scalar) and metrics for the current policy's log-probs [B, T] on `batch`; see
    `loss_terms`.
    """
    terms = token_terms(config, log_probs, batch)
    return terms.total / denominator(terms.parts()).to(terms.total.dtype), terms.metrics
