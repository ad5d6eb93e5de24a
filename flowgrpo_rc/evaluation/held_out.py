"""Held-out evaluation: samples with fixed seeds, scored by the training rewards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from flowgrpo_rc.batch import Prompt, Rewards
from flowgrpo_rc.core.metrics import MetricBag
from flowgrpo_rc.core.random import derive_seed
from flowgrpo_rc.distributed.processes import Processes
from flowgrpo_rc.rewards.collect import collect_rewards, record_rewards
from flowgrpo_rc.rewards.manager import RewardManager
from flowgrpo_rc.rollout.config import EvaluationConfig

NUM_SHOWN = 16


class HeldOut(NamedTuple):
    """Held-out samples.

    Attributes:
      samples: images, videos or texts; None if they were not decoded.
      latents: latents of images, [N, ...]; None for texts.
    """

    samples: Any
    latents: Tensor | None = None

    def first(self, count: int) -> HeldOut:
        """Returns the first `count` samples."""
        return HeldOut(*(None if column is None else column[:count] for column in self))


class HeldOutSampler(Protocol):
    """Draws one held-out sample for each prompt: `Task.sample`."""

    def __call__(
        self, prompts: Sequence[Prompt], seeds: Sequence[int], *, decode: bool = True
    ) -> HeldOut:
        """See `Task.sample`."""


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


class Scored(NamedTuple):
    """Samples of all processes, scored.

    Attributes:
      rewards: rewards of this process's share.
      first: place of the first of them among all.
      shown: the first samples of all, the same on all processes.
    """

    rewards: Rewards
    first: int
    shown: Sequence[Any]


class Evaluator:
    """Samples the held-out prompts with the trainer's own weights, in the trainer's precision.

    It draws nothing from the randomness of the training.
    """

    def __init__(
        self,
        sample: HeldOutSampler,
        prompts: Sequence[Prompt],
        config: EvaluationConfig,
        rewards: RewardManager,
    ) -> None:
        """Takes the first `config.n` held-out prompts."""
        self._sample = sample
        self._rewards = rewards
        self._batch_size = config.batch_size
        self._prompts = list(prompts)[: config.n]
        self._seeds = [derive_seed(config.seed, "evaluation", p.index) for p in self._prompts]

    def run(self, processes: Processes) -> HeldOutScores:
        """Evaluates this process's contiguous share; the metrics are exact after reduction."""
        prompts = self._prompts[:NUM_SHOWN]
        rewards, first, shown = score_samples(
            self._sample,
            self._prompts,
            self._seeds,
            self._rewards,
            processes,
            batch_size=self._batch_size,
            show=len(prompts),
        )
        metrics = MetricBag()
        record_rewards(metrics, rewards, prefix="val", total="reward")
        scores = processes.rows_of_all(rewards.total, first, len(prompts)).tolist()
        return HeldOutScores(metrics, shown, prompts, scores)


def score_samples(
    sample: HeldOutSampler,
    prompts: Sequence[Prompt],
    seeds: Sequence[int],
    rewards: RewardManager,
    processes: Processes,
    *,
    batch_size: int,
    show: int,
) -> Scored:
    """Draws a sample for each prompt and scores it; each process makes a contiguous share.

    Sharded weights are gathered by all processes at once, so all must run the same forwards. A
    share that is too small is filled up with the last prompt, whose samples are dropped.

    Args:
      sample: draws the samples.
      prompts: the prompts, [N].
      seeds: the seed of each sample, [N].
      rewards: score them.
      processes: the processes of the run.
      batch_size: samples made at once.
      show: how many of the first samples are returned; 0 for none.
    """
    share = -(-len(prompts) // processes.count)
    first = processes.rank * share
    own = prompts[first : first + share]
    missing = share - len(own)
    filled = [*own, *[prompts[-1]] * missing]
    filled_seeds = [*seeds[first : first + share], *[seeds[-1]] * missing]
    shown: list[Any] = []
    handles = []
    for start in range(0, share, batch_size):
        stop = start + batch_size
        showing = len(shown) < show
        made = sample(
            filled[start:stop],
            filled_seeds[start:stop],
            decode=showing or rewards.needs_samples,
        )
        batch = own[start:stop]
        if batch:
            scored = made.first(len(batch))
            handles.append(rewards.submit(scored.samples, batch, scored.latents))
        if showing:
            shown.extend(made.samples)
    collected = collect_rewards(rewards, handles, processes, grouped=False)
    samples = _shown_by_all(shown, first, show, processes) if show else ()
    return Scored(collected, first, samples)


def _shown_by_all(samples: Sequence[Any], first: int, total: int, processes: Processes) -> Any:
    """Returns the samples of the first `total` prompts; this process made those from `first` on."""
    if isinstance(samples[0], str):
        return processes.texts_of_all(samples, first, total)
    return processes.rows_of_all(torch.from_numpy(np.stack(samples)), first, total).numpy()
