"""Held-out evaluation: samples with fixed seeds, scored by the training rewards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.core.metrics import MetricBag
from flowgrpo_rc.distributed.processes import Processes
from flowgrpo_rc.rewards.collect import collect_rewards, record_rewards
from flowgrpo_rc.rewards.manager import RewardManager
from flowgrpo_rc.rollout.config import EvaluationConfig
from flowgrpo_rc.training.tasks.task import Task

NUM_SHOWN = 16


class HeldOutScores(NamedTuple):
    """Scores of the held-out prompts.

    Attributes:
      metrics: `reward` and its components, not yet reduced.
      samples: samples of the first prompts, from all processes.
      prompts: the prompts of these samples.
      scores: the rewards of these samples.
    """

    metrics: MetricBag
    samples: Sequence[Any]
    prompts: Sequence[Prompt]
    scores: Sequence[float]


class Evaluator:
    """Samples the held-out prompts with the trainer's own weights, in the trainer's precision.

    It draws nothing from the randomness of the training.
    """

    def __init__(
        self,
        task: Task,
        prompts: Sequence[Prompt],
        config: EvaluationConfig,
        rewards: RewardManager,
    ) -> None:
        """Takes the first `config.n` held-out prompts."""
        self._task = task
        self._rewards = rewards
        self._batch_size = config.batch_size
        self._prompts = list(prompts)[: config.n]

    def run(self, processes: Processes) -> HeldOutScores:
        """Evaluates this process's contiguous share; the metrics are exact after reduction.

        Sharded weights are gathered by all processes at once, so all must run the same forwards. A
        share that is too small is filled up with the last prompt, whose samples are dropped.
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
        metrics = MetricBag()
        rewards = collect_rewards(self._rewards, handles, processes)
        record_rewards(metrics, rewards, prefix="val", total="reward")
        prompts = self._prompts[:NUM_SHOWN]
        scores = processes.rows_of_all(rewards.total, first, len(prompts)).tolist()
        samples = _shown_by_all(shown, first, len(prompts), processes)
        return HeldOutScores(metrics, samples, prompts, scores)


def _shown_by_all(samples: Sequence[Any], first: int, total: int, processes: Processes) -> Any:
    """Returns the samples of the first `total` prompts; this process made those from `first` on."""
    if isinstance(samples[0], str):
        return processes.texts_of_all(samples, first, total)
    return processes.rows_of_all(torch.from_numpy(np.stack(samples)), first, total).numpy()
