"""Held-out evaluation: samples with fixed seeds, scored by the training rewards."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from flowgrpo_rc.batch import Prompt, Rewards
from flowgrpo_rc.core.metrics import MetricBag
from flowgrpo_rc.core.random import derive_seed
from flowgrpo_rc.distributed.processes import Processes
from flowgrpo_rc.rewards.base import batches
from flowgrpo_rc.rewards.collect import collect_rewards, record_rewards
from flowgrpo_rc.rewards.manager import RewardManager
from flowgrpo_rc.rollout.config import EvaluationConfig

NUM_SHOWN = 16
NUM_FOLLOWED = 4  # of them, at more steps than those of evaluations
SEED = 42  # of the noise of held-out samples, in every run


class HeldOut(NamedTuple):
    """Held-out samples."""

    samples: Any  # images, videos or texts; None if they were not decoded
    latents: Tensor | None = None  # of images, [N, ...]; None for texts

    def first(self, count: int) -> "HeldOut":
        """Returns the first `count` samples."""
        return HeldOut(*(None if column is None else column[:count] for column in self))


class HeldOutSampler(Protocol):
    """Draws one held-out sample for each prompt: `Task.sample`."""

    def __call__(
        self, prompts: Sequence[Prompt], seeds: Sequence[int], *, decode: bool = True
    ) -> HeldOut: ...


class HeldOutScores(NamedTuple):
    """Scores of the held-out prompts, and samples of the first ones from all processes."""

    metrics: MetricBag  # `reward` and its components, not yet reduced
    samples: Sequence[Any]
    prompts: Sequence[Prompt]  # of these samples
    scores: Sequence[float]  # of these samples


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
        self._seeds = [derive_seed(SEED, "evaluation", p.index) for p in self._prompts]

    def run(self, processes: Processes, first: int | None = None) -> HeldOutScores:
        """Evaluates this process's contiguous share; the metrics are exact after reduction.

        With `first` only so many prompts are evaluated.
        """
        prompts = self._prompts[:NUM_SHOWN][:first]
        rewards, shown = score_samples(
            self._sample,
            self._prompts[:first],
            self._seeds[:first],
            self._rewards,
            processes,
            batch_size=self._batch_size,
            show=len(prompts),
        )
        metrics = MetricBag()
        record_rewards(metrics, rewards, prefix="val", total="reward")
        scores = processes.gather_objects(rewards.total.tolist())[: len(prompts)]
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
) -> tuple[Rewards, Sequence[Any]]:
    """Draws a sample for each prompt and scores it; each process makes a contiguous share.

    Sharded weights are gathered by all processes at once, so all must run the same forwards. A
    share that is too small is filled up with the last prompt, whose samples are dropped.

    Returns the rewards of this share, and the first `show` samples of all, the same everywhere.
    """
    share = -(-len(prompts) // processes.count)
    mine = slice(processes.rank * share, (processes.rank + 1) * share)
    own = prompts[mine]
    missing = share - len(own)
    filled = [*own, *[prompts[-1]] * missing]
    filled_seeds = [*seeds[mine], *[seeds[-1]] * missing]
    made: list[Any] = []
    handles = []
    for rows in batches(share, batch_size):
        showing = len(made) < show
        drawn = sample(filled[rows], filled_seeds[rows], decode=showing or rewards.needs_samples)
        if batch := own[rows]:
            scored = drawn.first(len(batch))
            handles.append(rewards.submit(scored.samples, batch, scored.latents))
        if showing:
            made.extend(drawn.samples)
    collected = collect_rewards(rewards, handles, processes, grouped=False)
    # Shares are contiguous, so those of all processes follow each other.
    return collected, processes.gather_objects(made)[:show] if show else ()
