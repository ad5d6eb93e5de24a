"""Group-relative advantages: GRPO (arXiv 2402.03300), as FlowGRPO uses it, Dr.GRPO (arXiv
2503.20783), RLOO (arXiv 2402.14740) and, of several rewards, GDPO (arXiv 2601.05242)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flowgrpo_rc.core.metrics import MetricBag, std_from_moments
from flowgrpo_rc.core.reduce import AllReduce, identity, masked_mean

# estimator -> (divide by a standard deviation, take that of the whole batch), where the user does
# not say
ESTIMATORS = {
    "flow_grpo": (True, True),
    "grpo": (True, False),
    "dr_grpo": (False, False),
    "rloo": (False, False),
    "gdpo": (True, False),
}


class Advantages(NamedTuple):
    """values [B] float64, 0 for invalid samples; zero_std [G] bool per group of this process."""

    values: Tensor
    zero_std: Tensor


def group_relative(
    rewards: Tensor,
    group: Tensor,
    valid: Tensor,
    *,
    norm_by_std: bool = True,
    global_std: bool = False,
    leave_one_out: bool = False,
    eps: float = 1e-4,
    all_reduce: AllReduce = identity,
) -> Advantages:
    """(reward - mean of its group) / (std + eps).

    rewards [B]; group [B] int64, whole on this process; valid [B] bool: samples that are False
    (their reward failed, or all of their steps were rejected) leave the baseline and get 0, and so
    does the last one of a group. With `leave_one_out` (RLOO) the mean is that of the others of the
    group. With `global_std` the standard deviation is that of all valid rewards of the batch over
    all processes (about the global mean, as in FlowGRPO); without `norm_by_std` there is none
    (Dr.GRPO). Standard deviations are those of the population. A group whose rewards are all equal
    gets exactly 0.
    """
    rewards = torch.where(valid, rewards, torch.zeros_like(rewards)).double()
    _, index = torch.unique(group, return_inverse=True)
    num_groups = int(index.max()) + 1
    member = torch.nn.functional.one_hot(index, num_groups).bool().T & valid
    rows = rewards.expand(num_groups, -1)
    mean_g = masked_mean(rows, member, 1)
    centred = torch.where(valid, rewards - mean_g[index], torch.zeros_like(rewards))
    highest = torch.where(member, rows, -torch.inf).amax(1)
    lowest = torch.where(member, rows, torch.inf).amin(1)
    zero_std = highest <= lowest
    centred = torch.where(zero_std[index], torch.zeros_like(centred), centred)
    size = member.sum(1)[index].double()
    others = size / (size - 1).clamp(min=1) if leave_one_out else torch.ones_like(centred)
    if not norm_by_std:
        return Advantages(centred * others, zero_std)
    if global_std:
        mean = masked_mean(rewards, valid, all_reduce=all_reduce)
        std = masked_mean((rewards - mean) ** 2, valid, all_reduce=all_reduce).sqrt()
    else:
        std = masked_mean(centred.expand(num_groups, -1) ** 2, member, 1).sqrt()[index]
    return Advantages(centred * others / (std + eps), zero_std)


def group_decoupled(
    rewards: Sequence[Tensor],
    weights: Sequence[float],
    group: Tensor,
    valid: Tensor,
    *,
    eps: float = 1e-4,
    all_reduce: AllReduce = identity,
) -> Advantages:
    """GDPO: each reward over the mean and standard deviation of its group, then their weighted sum
    over its standard deviation in the batch.

    So the scale of a reward no longer decides what it counts, only its weight does. rewards: [B]
    for each of the weights; group, valid and eps as in `group_relative`. The sum needs no centring
    in the batch, since every group has mean 0. A group in which each reward is the same for all
    gets exactly 0.
    """
    alone = [group_relative(reward, group, valid, eps=eps) for reward in rewards]
    summed = torch.stack(
        [weight * part.values for weight, part in zip(weights, alone, strict=True)]
    ).sum(0)
    std = masked_mean(summed**2, valid, all_reduce=all_reduce).sqrt()
    return Advantages(summed / (std + eps), torch.stack([part.zero_std for part in alone]).all(0))


def estimate(
    estimator: str,
    rewards: Tensor,
    terms: Sequence[Tensor],
    weights: Sequence[float],
    group: Tensor,
    valid: Tensor,
    *,
    norm_by_std: bool,
    global_std: bool,
    all_reduce: AllReduce = identity,
) -> Advantages:
    """Computes the advantages of an estimator by its name, one of `ESTIMATORS`.

    Args:
      estimator: the name.
      rewards: weighted sum of the rewards, [B].
      terms: each reward by itself, [B]; read by `gdpo` alone.
      weights: weight of each of the terms.
      group: index of the prompt that a sample belongs to, [B] int64.
      valid: samples that have a reward and take part, [B] bool.
      norm_by_std: whether to divide by a standard deviation.
      global_std: whether that is the standard deviation of the batch.
      all_reduce: adds up a tensor over processes.
    """
    if estimator == "gdpo":
        return group_decoupled(terms, weights, group, valid, all_reduce=all_reduce)
    return group_relative(
        rewards,
        group,
        valid,
        norm_by_std=norm_by_std,
        global_std=global_std,
        leave_one_out=estimator == "rloo",
        all_reduce=all_reduce,
    )


def advantage_metrics(advantages: Advantages, valid: Tensor) -> MetricBag:
    """Measures advantages over the samples that are `valid`, [B] bool."""
    metrics = MetricBag()
    metrics.mean("zero_std_ratio", advantages.zero_std.double())
    metrics.mean("advantages/mean", advantages.values, valid)
    metrics.mean("advantages/_square", advantages.values**2, valid)
    metrics.max("advantages/max", advantages.values, valid)
    metrics.min("advantages/min", advantages.values, valid)
    moments = ("advantages/mean", "advantages/_square")
    metrics.derive("advantages/std", moments, std_from_moments)
    return metrics
