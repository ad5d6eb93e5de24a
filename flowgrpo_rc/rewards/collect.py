"""The rewards of a batch that several processes share."""

from collections.abc import Sequence

import torch

from flowgrpo_rc.batch import Rewards
from flowgrpo_rc.core.metrics import MetricBag, std_from_moments
from flowgrpo_rc.distributed.processes import Processes
from flowgrpo_rc.rewards.manager import RewardHandle, RewardManager


def collect_rewards(
    manager: RewardManager,
    handles: Sequence[RewardHandle],
    processes: Processes,
    *,
    grouped: bool,
    earlier: Sequence[Rewards] = (),
) -> Rewards:
    """Waits for the rewards of this process's samples, which were submitted as groups or not.

    A process without samples takes part with empty columns, so names and reductions agree. All
    processes raise RewardError if too many samples have no reward, of these and the `earlier` ones.
    """
    nothing = torch.zeros(0, dtype=torch.float64)
    rewards = Rewards(
        total=nothing,
        valid=nothing.bool(),
        parts=dict.fromkeys(manager.part_keys(grouped=grouped), nothing),
    )
    if handles:
        rewards = manager.collect(handles)
    seen = Rewards.join([*earlier, rewards])
    failed = manager.count_failed(seen)
    numbers = torch.tensor([*failed.values(), len(seen.total)], device=processes.device)
    *counts, total = processes.sum(numbers).tolist()
    manager.check_failed_fraction(dict(zip(failed, counts, strict=True)), total)
    return rewards


def record_rewards(metrics: MetricBag, rewards: Rewards, *, prefix: str, total: str) -> None:
    """Adds the mean and standard deviation of the weighted sum, each reward, and `failed_fraction`.

    A mean is over the samples that have the reward. `total` names the weighted sum.
    """
    has_total = rewards.valid & rewards.total.isfinite()
    metrics.mean(f"{prefix}/{total}", rewards.total, has_total)
    metrics.mean(f"{prefix}/_square", rewards.total**2, has_total)
    metrics.derive(f"{prefix}/std", (f"{prefix}/{total}", f"{prefix}/_square"), std_from_moments)
    metrics.mean(f"{prefix}/failed_fraction", (~rewards.valid).double())
    for name, values in rewards.parts.items():
        metrics.mean(f"{prefix}/{name}", values, ~values.isnan())
