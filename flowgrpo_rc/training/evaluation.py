"""Held-out evaluation: samples with fixed seeds, scored by the training rewards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from flowgrpo_rc.batch import Prompt, Rewards
from flowgrpo_rc.core.metrics import MetricBag, std_from_moments
from flowgrpo_rc.distributed.processes import Processes
from flowgrpo_rc.rewards.manager import RewardHandle, RewardManager
from flowgrpo_rc.rollout.config import EvaluationConfig
from flowgrpo_rc.training.tasks.task import Task

NUM_SHOWN = 16


class HeldOutScores(NamedTuple):
    """metrics: `reward` and its parts, not yet reduced; the samples of the first prompts, whichever
    process made them, with their prompts and scores."""

    metrics: MetricBag
    samples: Sequence[Any]
    prompts: Sequence[Prompt]
    scores: Sequence[float]


class Evaluator:
    """Samples the held-out prompts with the trainer's own weights, in the trainer's precision.

    No training randomness is consumed.
    """

    def __init__(
        self,
        task: Task,
        prompts: Sequence[Prompt],
        config: EvaluationConfig,
        rewards: RewardManager,
    ) -> None:
        self._task, self._rewards, self._batch_size = task, rewards, config.batch_size
        self._prompts = list(prompts)[: config.n]

    def run(self, processes: Processes) -> HeldOutScores:
        """Evaluate this process's contiguous share; the metrics are exact after reduction.

        Sharded weights are gathered by all processes at once. So all run the same forwards: what a
        share lacks is filled up by the last prompt, whose samples nobody sees.
        """
        share = -(-len(self._prompts) // processes.count)
        first = processes.rank * share
        own = self._prompts[first : first + share]
        filled = [*own, *[self._prompts[-1]] * (share - len(own))]
        shown: list[Any] = []
        handles = []
        for start in range(0, share, self._batch_size):
            show = len(shown) < NUM_SHOWN
            decode = show or self._rewards.needs_samples
            made = self._task.sample(filled[start : start + self._batch_size], decode=decode)
            batch = own[start : start + self._batch_size]
            if batch:
                scored = made.first(len(batch))
                handles.append(self._rewards.submit(scored.samples, batch, scored.latents))
            if show:
                shown.extend(made.samples)
        bag = MetricBag()
        rewards = collect_rewards(self._rewards, handles, processes)
        record_rewards(bag, rewards, prefix="val", total="reward")
        prompts = self._prompts[:NUM_SHOWN]
        scores = processes.rows_of_all(rewards.total, first, len(prompts)).tolist()
        return HeldOutScores(
            bag, _shown_by_all(shown, first, len(prompts), processes), prompts, scores
        )


def _shown_by_all(samples: Sequence[Any], first: int, total: int, processes: Processes) -> Any:
    """The samples of the first `total` prompts; this process made those of the prompts first, first
    + 1, ...
    """
    if not isinstance(samples[0], str):
        return processes.rows_of_all(torch.from_numpy(np.stack(samples)), first, total).numpy()
    longest = torch.tensor([max(1, *map(len, samples))], device=processes.device)
    letters = np.array(samples, dtype=f"U{int(processes.max(longest).item())}")
    codes = letters.view(np.int32).reshape(len(samples), -1)
    whole = processes.rows_of_all(torch.from_numpy(codes), first, total)
    return whole.numpy().view(letters.dtype).ravel().tolist()


def collect_rewards(
    manager: RewardManager, handles: Sequence[RewardHandle], processes: Processes
) -> Rewards:
    """Wait for the rewards of this process's samples; RewardError, on all processes, if too many
    have none.

    A process without samples takes part with empty columns, so that names and reductions agree.
    """
    nothing = torch.zeros(0, dtype=torch.float64)
    rewards = Rewards(
        total=nothing, valid=nothing.bool(), parts=dict.fromkeys(manager.part_keys, nothing)
    )
    if handles:
        rewards = manager.collect(handles)
    failed = torch.tensor(
        [*manager.count_failed(rewards).values(), len(rewards.total)], device=processes.device
    )
    *counts, total = processes.sum(failed).tolist()
    manager.check_failed_fraction(dict(zip(manager.names, counts, strict=True)), total)
    return rewards


def record_rewards(bag: MetricBag, rewards: Rewards, *, prefix: str, total: str) -> None:
    """`prefix/total` (the weighted sum), its `std`, every part, each over the samples that have
    one, and `failed_fraction`."""
    bag.mean(f"{prefix}/{total}", rewards.total, rewards.valid)
    bag.mean(f"{prefix}/_square", rewards.total**2, rewards.valid)
    bag.derive(f"{prefix}/std", (f"{prefix}/{total}", f"{prefix}/_square"), std_from_moments)
    bag.mean(f"{prefix}/failed_fraction", (~rewards.valid).double())
    for name, values in rewards.parts.items():
        bag.mean(f"{prefix}/{name}", values, ~values.isnan())
