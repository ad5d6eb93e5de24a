"""Held-out evaluation: samples with fixed seeds, scored by the training rewards."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from flowgrpo_rc.batch import Prompt, Rewards
from flowgrpo_rc.core.metrics import MetricBag
from flowgrpo_rc.core.random import derive_seed
from flowgrpo_rc.distributed.processes import Processes
from flowgrpo_rc.rewards.base import Samples, batches
from flowgrpo_rc.rewards.collect import collect_rewards, record_rewards
from flowgrpo_rc.rewards.manager import RewardManager
from flowgrpo_rc.rollout.config import EvaluationConfig

Sample = np.ndarray | str  # an image, a video or a text
NUM_SHOWN = 16
NUM_FOLLOWED = 4  # of them, at more steps than those of evaluations
SEED = 42  # of the noise of held-out samples, in every run


class HeldOut(NamedTuple):
    """Held-out samples."""

    samples: Samples | None  # None if they were not decoded
    latents: Tensor | None = None  # of images, [N, ...]; None for texts

    def first(self, count: int) -> "HeldOut":
        """Returns the first `count` samples."""
        samples = None if self.samples is None else self.samples[:count]
        return HeldOut(samples, None if self.latents is None else self.latents[:count])


class HeldOutSampler(Protocol):
    """Draws one held-out sample for each prompt: `Task.sample`."""

    def __call__(
        self, prompts: Sequence[Prompt], seeds: Sequence[int], *, decode: bool = True
    ) -> HeldOut: ...


class HeldOutScores(NamedTuple):
    """Scores of the held-out prompts, and samples of the first ones from all processes."""

    metrics: MetricBag  # `reward` and its components, not yet reduced
    samples: Sequence[Sample]
    prompts: Sequence[Prompt]  # of these samples
    scores: Sequence[float]  # of these samples


@dataclass(frozen=True)
class Questions:
    """Prompts, each with the seed of its noise, and how their samples are made and scored."""

    sample: HeldOutSampler
    prompts: Sequence[Prompt]
    seeds: Sequence[int]
    rewards: RewardManager
    batch_size: int

    def ask(
        self, processes: Processes, first: int | None = None, *, show: int
    ) -> tuple[Rewards, Sequence[Sample]]:
        """Draws a sample for each prompt and scores it; each process makes a contiguous share.

        Sharded weights are gathered by all processes at once, so all must run the same forwards. A
        share that is too small is filled up with the last prompt, whose samples are dropped. With
        `first` only so many prompts are asked.

        Returns the rewards of this share, and the first `show` samples of all, the same everywhere.
        """
        prompts = self.prompts[:first]
        seeds = self.seeds[:first]
        share = -(-len(prompts) // processes.count)
        of_share = slice(processes.rank * share, (processes.rank + 1) * share)
        shared_prompts = prompts[of_share]
        missing = share - len(shared_prompts)
        filled = [*shared_prompts, *[prompts[-1]] * missing]
        filled_seeds = [*seeds[of_share], *[seeds[-1]] * missing]
        shown: list[Sample] = []
        handles = []
        for rows in batches(share, self.batch_size):
            shows = len(shown) < show
            decode = shows or self.rewards.needs_samples
            drawn = self.sample(filled[rows], filled_seeds[rows], decode=decode)
            if batch := shared_prompts[rows]:
                scored = drawn.first(len(batch))
                handles.append(self.rewards.submit(scored.samples, batch, scored.latents))
            if shows and drawn.samples is not None:
                shown.extend(drawn.samples)
        rewards = collect_rewards(self.rewards, handles, processes, grouped=False)
        # Shares are contiguous, so those of all processes follow each other.
        return rewards, processes.gather_objects(shown)[:show] if show else ()


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
        evaluated = prompts[: config.n]
        seeds = [derive_seed(SEED, "evaluation", prompt.index) for prompt in evaluated]
        self._questions = Questions(sample, evaluated, seeds, rewards, config.batch_size)

    def run(self, processes: Processes, first: int | None = None) -> HeldOutScores:
        """Evaluates this process's contiguous share; the metrics are exact after reduction.

        With `first` only so many prompts are evaluated.
        """
        prompts = self._questions.prompts[:NUM_SHOWN][:first]
        rewards, shown = self._questions.ask(processes, first, show=len(prompts))
        metrics = MetricBag()
        record_rewards(metrics, rewards, prefix="val", total="reward")
        scores = processes.gather_objects(rewards.total.tolist())[: len(prompts)]
        return HeldOutScores(metrics, shown, prompts, scores)
