"""Advantages of samples over their groups: GRPO and its relatives.

Legend: B samples of this process, G groups of this process. A group is the samples of one prompt.

    grpo       https://arxiv.org/abs/2402.03300, standard deviation of the group
    flow_grpo  https://arxiv.org/abs/2505.05470, standard deviation of the batch, as in its code
    dr_grpo    https://arxiv.org/abs/2503.20783, no standard deviation
    rloo       https://arxiv.org/abs/2402.14740, mean of the other samples of the group
    gdpo       https://arxiv.org/abs/2601.05242, each of several rewards normalised by itself
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flowgrpo_rc.core.metrics import MetricBag, std_from_moments
from flowgrpo_rc.core.reduce import AllReduce, identity, masked_mean, select

# estimator -> its (norm_by_std, global_std)
ESTIMATORS = {
    "flow_grpo": (True, True),
    "grpo": (True, False),
    "dr_grpo": (False, False),
    "rloo": (False, False),
    "gdpo": (True, False),
}

EPS = 1e-4  # added to a standard deviation, in the unit of the rewards
_ROUNDING = 4 * torch.finfo(torch.float32).eps


class Advantages(NamedTuple):
    """The advantages of a batch."""

    values: Tensor  # float64, [B]; 0 for samples that are not valid
    zero_std: Tensor  # bool, [G]; True for groups of this process whose rewards are all equal


def group_relative(
    rewards: Tensor,
    group: Tensor,
    valid: Tensor,
    *,
    norm_by_std: bool = True,
    global_std: bool = False,
    leave_one_out: bool = False,
    all_reduce: AllReduce = identity,
) -> Advantages:
    """Computes the advantage of each sample over its group.

        A_i = c (r_i - mean_g) / (std + EPS)

    mean_g is the mean of the valid rewards of the group. c is 1, or n / (n - 1) with
    `leave_one_out` for a group of n valid samples: c (r_i - mean_g) is then the reward less the
    mean of the other samples. A group whose rewards are all equal, but for the rounding of fp32,
    gets exactly 0.

    Args:
      rewards: reward of each sample, [B], in any unit.
      group: int64, [B]; the group of each sample. A group is whole on one process.
      valid: bool, [B]. A sample whose reward failed or whose steps are all rejected is False: it
        has no part in any mean and gets 0. The only valid sample of a group gets 0 as well.
      norm_by_std: divide by a standard deviation, of the population. Dr.GRPO does not.
      global_std: take the standard deviation of all valid rewards of the batch, about their mean
        and over all processes, in place of that of the group. FlowGRPO does.
      leave_one_out: compare with the other samples of the group only, as RLOO does.
      all_reduce: adds a tensor over the processes.

    Returns:
      The advantages, and which groups have equal rewards.

    See "DeepSeekMath", https://arxiv.org/abs/2402.03300, section 4.1, and "Flow-GRPO",
    https://arxiv.org/abs/2505.05470.
    """
    rewards = select(rewards, valid).double()
    _, index = torch.unique(group, return_inverse=True)
    num_groups = int(index.max()) + 1
    in_group_GB = torch.nn.functional.one_hot(index, num_groups).bool().T & valid
    rewards_GB = rewards.expand(num_groups, -1)
    mean_G = masked_mean(rewards_GB, in_group_GB, 1)
    zero_std_G = _all_equal(rewards_GB, in_group_GB)

    centred = select(rewards - mean_G[index], valid & ~zero_std_G[index])
    advantages = centred
    if leave_one_out:
        size = in_group_GB.sum(1)[index].double()
        advantages = centred * (size / (size - 1).clamp(min=1))
    if not norm_by_std:
        return Advantages(advantages, zero_std_G)

    if global_std:
        mean = masked_mean(rewards, valid, all_reduce=all_reduce)
        std = masked_mean((rewards - mean) ** 2, valid, all_reduce=all_reduce).sqrt()
    else:
        centred_GB = centred.expand(num_groups, -1)
        std = masked_mean(centred_GB**2, in_group_GB, 1).sqrt()[index]
    return Advantages(advantages / (std + EPS), zero_std_G)


def group_decoupled(
    weighted_rewards: Sequence[tuple[float, Tensor]],
    group: Tensor,
    valid: Tensor,
    *,
    all_reduce: AllReduce = identity,
) -> Advantages:
    """Computes the advantage of several rewards, each of which is normalised by itself.

        A_i = S_i / (std(S) + EPS),   S_i = sum_k w_k (r_ki - mean_gk) / (std_gk + EPS)

    mean_gk and std_gk are those of reward k in the group, std(S) that of the whole batch. So only
    its weight decides how much a reward counts, not its scale. S needs no mean taken off, since
    the mean of every group is 0. A reward that is the same for all samples of a group, but for the
    rounding of fp32, adds exactly 0.

    Args:
      weighted_rewards: each reward as its weight and its values, [B], in its own unit.
      group: int64, [B]; the group of each sample. A group is whole on one process.
      valid: bool, [B]; the samples that count, as in `group_relative`.
      all_reduce: adds a tensor over the processes.

    Returns:
      The advantages, and which groups have equal values of every reward.

    See "GDPO", https://arxiv.org/abs/2601.05242.
    """
    by_reward = [(weight, group_relative(x, group, valid)) for weight, x in weighted_rewards]
    total = torch.stack([weight * advantages.values for weight, advantages in by_reward]).sum(0)
    std = masked_mean(total**2, valid, all_reduce=all_reduce).sqrt()
    zero_std = torch.stack([advantages.zero_std for _, advantages in by_reward]).all(0)
    return Advantages(total / (std + EPS), zero_std)


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
    """Computes the advantages of an estimator by its name, one of `ESTIMATORS`, which has its
    `norm_by_std` and `global_std`.

    `rewards` [B] are the weighted sum of the `terms`, each [B], which `gdpo` alone reads.
    """
    if estimator == "gdpo":
        weighted_rewards = list(zip(weights, terms, strict=True))
        return group_decoupled(weighted_rewards, group, valid, all_reduce=all_reduce)
    return group_relative(
        rewards,
        group,
        valid,
        norm_by_std=norm_by_std,
        global_std=global_std,
        leave_one_out=estimator == "rloo",
        all_reduce=all_reduce,
    )


def farthest(advantages: Tensor, group: Tensor, size: int) -> Tensor:
    """Finds the samples of each group whose advantages are farthest from 0.

    Training on them alone loses little: what a sample adds to the squared norm of the gradient
    grows with its advantage squared. Of equal ones the first are taken.

    Args:
      advantages: of each sample, [B].
      group: the group of each sample, int64, [B].
      size: how many to take of each group, at most.

    Returns:
      Their positions in ascending order, int64, [B'].

    See "Not All Rollouts are Useful", https://arxiv.org/abs/2504.13818, which takes the samples of
    a group whose rewards have the largest variance.
    """
    order = advantages.abs().argsort(descending=True, stable=True)
    order = order[group[order].argsort(stable=True)]  # group by group, the farthest first
    _, counts = torch.unique_consecutive(group[order], return_counts=True)
    first = (counts.cumsum(0) - counts).repeat_interleave(counts)
    place = torch.arange(len(order), device=order.device) - first
    return order[place < size].sort().values


def advantage_metrics(
    advantages: Advantages, valid: Tensor, group: Tensor, ends: Tensor
) -> MetricBag:
    """Measures advantages, and what leaves a group without any.

    Args:
      advantages: those of the batch.
      valid: samples that have a reward and take part, [B] bool.
      group: int64, [B]; the group of each sample.
      ends: what each sample has become, [B, ...]; equal only for samples that are equal.
    """
    members = [(group == slot).nonzero().squeeze(1) for slot in group.unique()]
    single = torch.stack([valid[rows].sum() < 2 for rows in members])
    # Group by group, since a copy of all samples would be large.
    identical = torch.stack([(ends[rows] == ends[rows[0]]).all() for rows in members])
    metrics = MetricBag()
    metrics.mean("zero_std_ratio", advantages.zero_std.double())
    metrics.mean("advantages/single_ratio", single.double())
    metrics.mean("advantages/identical_ratio", identical.double())
    metrics.mean("advantages/mean", advantages.values, valid)
    metrics.mean("advantages/_square", advantages.values**2, valid)
    metrics.max("advantages/max", advantages.values, valid)
    metrics.min("advantages/min", advantages.values, valid)
    moments = ("advantages/mean", "advantages/_square")
    metrics.derive("advantages/std", moments, std_from_moments)
    return metrics


def _all_equal(rewards_GB: Tensor, in_group_GB: Tensor) -> Tensor:
    """Returns whether the rewards of each group are all equal, [G]; True for a group without any.

    Rewards are equal if they differ by the rounding of fp32 alone, in which models compute them:

        max_g - min_g <= 4 eps max_g |r|,   eps = 1.2e-7

    A deviation of that size would be divided by itself, twice in GDPO, and rounding would teach.
    The bound is relative, so a reward in small units still counts.
    """
    highest_G = torch.where(in_group_GB, rewards_GB, -torch.inf).amax(1)
    lowest_G = torch.where(in_group_GB, rewards_GB, torch.inf).amin(1)
    largest_G = select(rewards_GB.abs(), in_group_GB).amax(1)
    return highest_G - lowest_G <= _ROUNDING * largest_G
