"""Rejection sampling: which steps [B, T] stay in the loss."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flowgrpo_rc.core.kl import k2, k3
from flowgrpo_rc.core.reduce import masked_mean, masked_sum
from flowgrpo_rc.correction.bands import Band


def statistic(log_ratio: Tensor, mask: Tensor, band: Band) -> Tensor:
    """The criterion's statistic for each step [B, T]; sequence levels repeat their value over the steps.

    log_ratio is training - rollout. k1 stands for the log-ratio itself, so that its band is one on the ratio
    training / rollout.
    """
    estimate = {"k1": lambda x: x, "k2": k2, "k3": k3}[band.estimator](log_ratio)
    if band.level == "token":
        return estimate
    if band.level == "seq_sum":
        per_sequence = masked_sum(estimate, mask, 1)
    elif band.level == "seq_mean":
        per_sequence = masked_mean(estimate, mask, 1)
    else:
        per_sequence = torch.where(mask, estimate, torch.zeros_like(estimate)).amax(1)
    return per_sequence.unsqueeze(1).expand_as(estimate)


def rejection_mask(log_ratio: Tensor, mask: Tensor, bands: Sequence[Band]) -> Tensor:
    """`mask` without the steps that any band rejects or whose log-ratio is not finite -> [B, T] bool."""
    kept = mask & torch.isfinite(log_ratio)
    for band in bands:
        value = statistic(log_ratio, mask, band)
        kept = kept & (value >= band.lower) & (value <= band.upper)
    return kept
