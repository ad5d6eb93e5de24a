"""The slopes of the gradient study's losses on one batch.

Legend: E estimators, B samples, T steps of the SDE window.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from estimators import Estimator
from gradient_problem import PROMPTS, SAMPLES, Evaluation
from torch import Tensor

from flowgrpo_rc import DiffusionBatch
from flowgrpo_rc.core.random import generator
from flowgrpo_rc.core.transition import GaussianSteps

ORDER = 0  # seed of the order in which rewards are dealt out at random


def all_coefficients(
    given: Mapping[str, Estimator],
    batch: DiffusionBatch,
    rewards: Tensor,
    index: int,
    before: Evaluation,
    now: Evaluation,
) -> tuple[Tensor, dict[str, dict[str, Any]]]:
    """Computes the slopes of every estimator's loss on one batch.

    Each loss is taken for the rewards, and again for the same rewards dealt out at random.

    Args:
      given: the estimators by name.
      batch: the batch.
      rewards: reward of each sample, [B].
      index: number of the batch, which the random order of the rewards follows from.
      before: the policy before any update, on the batch.
      now: the policy that would be updated, on the batch.

    Returns:
      The slopes at the quantities of `Evaluation.slopes`, [3, 2E, B, T]; metrics by estimator.
    """
    order = torch.randperm(len(rewards), generator=generator(ORDER, index, "chance"))
    both = _twice(batch)
    old = _twice_found(before)
    new = old if now is before else _twice_found(now)
    dealt = torch.cat([rewards, rewards[order]])
    rows = []
    metrics = {}
    for name, estimator in given.items():
        # A loss over both halves has half the slope of each half's own loss, hence the factor 2.
        settled = estimator.settle(both, old)
        found, measured = estimator.coefficients(settled, dealt, new)
        rows.append(2 * found.unflatten(1, (2, -1)))
        metrics[name] = _shown(measured, settled, rows[-1][:, 0], rewards)
    return torch.cat(rows, 1), metrics


def _twice(batch: DiffusionBatch) -> DiffusionBatch:
    """Every sample twice, in groups of their own.

    So one loss serves the rewards and the rewards dealt out at random.
    """
    doubled = batch.select(torch.arange(len(batch)).repeat(2))
    return doubled.replace(group=torch.cat([batch.group, batch.group + PROMPTS]))


def _twice_found(found: Evaluation) -> Evaluation:
    """The evaluation of every sample twice, without its slopes."""
    gaussian = GaussianSteps(*(torch.cat([part] * 2) for part in found.gaussian))
    log_probs, means, old_kl = (
        torch.cat([part] * 2) for part in (found.log_probs, found.means, found.old_kl)
    )
    return Evaluation(log_probs, gaussian, means, old_kl, found.slopes)


def _shown(
    measured: Mapping[str, float], settled: DiffusionBatch, slopes: Tensor, rewards: Tensor
) -> dict[str, Any]:
    """The reported metrics, and the fraction of |advantage| whose step has no slope."""
    centred = rewards - rewards.view(-1, SAMPLES).mean(1).repeat_interleave(SAMPLES)
    size = centred.abs().unsqueeze(1).expand_as(slopes[0])
    gated = torch.where((slopes == 0).all(0), size, 0.0).sum(0) / size.sum(0)
    mask = settled.rejection_mask
    weights = settled.rollout_is_weights
    kept = 1.0 if mask is None else mask.double().mean().item()
    ess = measured.get("rollout_corr/rollout_is_eff_sample_size", 1.0)
    if weights is not None:
        ess = (weights.mean() ** 2 / (weights**2).mean()).item()
    return {
        "gated": gated.mean().item(),
        "clip_fraction": measured.get("clip_fraction", 0.0),
        "rejected": measured.get("rollout_corr/rollout_rs_masked_fraction", 1 - kept),
        "effective_samples": ess,
    }
