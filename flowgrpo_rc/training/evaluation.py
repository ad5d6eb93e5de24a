"""Held-out evaluation: samples with fixed seeds, scored by the training rewards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from flowgrpo_rc.batch import Prompt, Rewards
from flowgrpo_rc.core.metrics import MetricBag, std_from_moments
from flowgrpo_rc.rewards.manager import RewardHandle, RewardManager
from flowgrpo_rc.rollout.base import EvaluationConfig
from flowgrpo_rc.training.processes import Processes
from flowgrpo_rc.training.task import Task

NUM_SHOWN = 16


class Evaluation(NamedTuple):
    """metrics: `reward` and its parts, not yet reduced; the samples of this process's first prompts, their prompts and
    scores."""

    metrics: MetricBag
    samples: Sequence[Any]
    prompts: Sequence[Prompt]
    scores: Sequence[float]


class Evaluator:
    """Samples the held-out prompts with the trainer's own weights, in the trainer's precision.

    No training randomness is consumed.
    """

    def __init__(self, task: Task, prompts: Sequence[Prompt], config: EvaluationConfig, rewards: RewardManager) -> None:
        self._task, self._rewards, self._batch_size = task, rewards, config.batch_size
        self._prompts = list(prompts)[: config.n]

    def run(self, processes: Processes) -> Evaluation:
        """Evaluate this process's contiguous share; the metrics are exact after reduction."""
        share = -(-len(self._prompts) // processes.count)
        prompts = self._prompts[processes.rank * share : (processes.rank + 1) * share]
        shown: list[Any] = []
        handles = []
        for start in range(0, len(prompts), self._batch_size):
            batch = prompts[start : start + self._batch_size]
            samples = self._task.sample(batch)
            handles.append(self._rewards.submit(samples, batch))
            if len(shown) < NUM_SHOWN:
                shown.extend(samples)
        bag = MetricBag()
        rewards = collect_rewards(self._rewards, handles, processes)
        record_rewards(bag, rewards, prefix="val", total="reward")
        shown = shown[:NUM_SHOWN]
        return Evaluation(bag, shown, prompts[: len(shown)], rewards.total[: len(shown)].tolist())


def collect_rewards(manager: RewardManager, handles: Sequence[RewardHandle], processes: Processes) -> Rewards:
    """Wait for the rewards of this process's samples; RewardError, on all processes, if too many have none.

    A process without samples takes part with empty columns, so that names and reductions agree.
    """
    nothing = torch.zeros(0, dtype=torch.float64)
    rewards = Rewards(total=nothing, valid=nothing.bool(), parts=dict.fromkeys(manager.part_keys, nothing))
    if handles:
        rewards = manager.collect(handles)
    failed = torch.tensor([*manager.count_failed(rewards).values(), len(rewards.total)], device=processes.device)
    *counts, total = processes.sum(failed).tolist()
    manager.check_failed_fraction(dict(zip(manager.names, counts, strict=True)), total)
    return rewards


def record_rewards(bag: MetricBag, rewards: Rewards, *, prefix: str, total: str) -> None:
    """`prefix/total` (the weighted sum), its `std`, every part, each over the samples that have one, and
    `failed_fraction`."""
    bag.mean(f"{prefix}/{total}", rewards.total, rewards.valid)
    bag.mean(f"{prefix}/_square", rewards.total**2, rewards.valid)
    bag.derive(f"{prefix}/std", (f"{prefix}/{total}", f"{prefix}/_square"), std_from_moments)
    bag.mean(f"{prefix}/failed_fraction", (~rewards.valid).double())
    for name, values in rewards.parts.items():
        bag.mean(f"{prefix}/{name}", values, ~values.isnan())
