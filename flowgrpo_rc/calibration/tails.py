"""Finds how few evaluations a rollout needs behind its window: the same samples, shorter tails.

Rewards see the final image. A shorter tail makes another one, and what training takes from it is
its advantage. So tails are compared by the correlation of their advantages with those of the
schedule's own tail, from the same noise.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flowgrpo_rc.batch import DiffusionBatch, PromptBatch
from flowgrpo_rc.calibration.choice import Settings
from flowgrpo_rc.config.tree import Config
from flowgrpo_rc.core.metrics import MetricBag
from flowgrpo_rc.core.random import derive_seed
from flowgrpo_rc.core.reduce import identity
from flowgrpo_rc.core.schedule import TAILS
from flowgrpo_rc.rewards.groups import Groups
from flowgrpo_rc.rewards.manager import RewardManager
from flowgrpo_rc.rollout.concat import concat
from flowgrpo_rc.rollout.engine import ImageRequest, RolloutEngine
from flowgrpo_rc.training.advantages import AdvantageEstimator
from flowgrpo_rc.training.tasks.image import ImageTask

AGREEMENT = 0.95  # the least correlation of a tail that is recommended


class TailTrial(NamedTuple):
    """A tail, and what its samples are worth."""

    tail: str  # one of `core.schedule.TAILS`
    tail_steps: int  # evaluations behind the window
    evaluations: int  # of a whole sample
    # The correlation of its advantages with those of the schedule's own tail; nan for none.
    agreement: float


def check_tail(config: Config) -> None:
    """Raises ValueError if no step lies behind the window."""
    if config.rollout.window()[2] == config.rollout.pipeline.num_inference_steps:
        raise ValueError(
            "--tail: no step lies behind rollout.algo.sde_window_range, so there is no tail to "
            "shorten; end the range earlier"
        )


def try_tails(
    config: Config,
    task: ImageTask,
    engine: RolloutEngine[ImageRequest],
    prompts: PromptBatch,
) -> list[TailTrial]:
    """Samples the prompts once with the schedule's own tail and once with each shorter one, those
    with the fewest evaluations first.
    """
    steps, start = config.rollout.pipeline.num_inference_steps, config.rollout.window()[2]
    with scored(config, task, engine, prompts) as sampled:
        own, _ = sampled(tail="euler", tail_start=start, tail_steps=None)
        return [
            TailTrial(
                tail=tail,
                tail_steps=count,
                evaluations=start + count,
                agreement=correlation(
                    own, sampled(tail=tail, tail_start=start, tail_steps=count)[0]
                ),
            )
            for count in range(1, steps - start + 1)
            for tail in TAILS
            if (tail, count) != ("euler", steps - start)
        ]


@contextmanager
def scored(
    config: Config,
    task: ImageTask,
    engine: RolloutEngine[ImageRequest],
    prompts: PromptBatch,
) -> Iterator[Callable[..., tuple[Tensor, DiffusionBatch]]]:
    """Gives a function that samples the prompts from the same noise with changes of the spec. It
    returns the advantages as training would compute them, [B], and the batch.
    """
    seeds = [
        derive_seed(config.trainer.seed, "tails", slot, sample)
        for slot in prompts.slots
        for sample in range(config.rollout.n)
    ]
    request = task.request(prompts, seeds)
    manager = RewardManager(config.reward)
    estimator = AdvantageEstimator(config.algorithm, manager.weights, None, identity)

    def sampled(**changes: Any) -> tuple[Tensor, DiffusionBatch]:
        batches, handles = [], []
        for chunk in engine.generate(replace(request, spec=replace(request.spec, **changes))):
            batches.append(chunk.batch)
            groups = Groups(chunk.batch.group.tolist(), config.rollout.n)
            handles.append(manager.submit(chunk.samples, chunk.prompts, chunk.latents, groups))
        batch = concat(batches)
        assert isinstance(batch, DiffusionBatch)
        return estimator.of(batch, manager.collect(handles), MetricBag()), batch

    try:
        yield sampled
    finally:
        manager.close()


def cheapest(trials: Sequence[TailTrial]) -> TailTrial | None:
    """Returns the tail with the fewest evaluations that agrees, the better of two such; or None."""
    good = [trial for trial in trials if trial.agreement >= AGREEMENT]
    return min(good, key=lambda trial: (trial.evaluations, -trial.agreement), default=None)


def with_tail(settings: Settings, trials: Sequence[TailTrial]) -> Settings:
    """Returns the settings with the tail that `cheapest` finds, and a sentence about it."""
    found = cheapest(trials)
    chosen: dict[str, Any] = {}
    note = f"No shorter tail has a correlation of {AGREEMENT} with the advantages of the full."
    if found is not None:
        chosen = {"rollout.algo.tail": found.tail, "rollout.algo.tail_steps": found.tail_steps}
        note = (
            f"{found.evaluations} evaluations of a sample do: with tail={found.tail} the "
            f"advantages have a correlation of {found.agreement:.3f} with those of the full "
            "schedule."
        )
    return replace(settings, values=settings.values | chosen, notes=[*settings.notes, note])


def correlation(left: Tensor, right: Tensor) -> float:
    """Returns Pearson's correlation of two rows of numbers, [B]; nan if one of them is constant."""
    return torch.corrcoef(torch.stack([left, right]).double())[0, 1].item()
