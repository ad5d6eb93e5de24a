"""Finds how many block evaluations a rollout needs: the same samples, with `rollout.cache`.

As for a shorter tail, a setting is worth as much as its advantages agree with those of samples that
evaluate all blocks. Where steps of the window are cached, its mismatch has to be one that the
configured loss carries in bypass mode.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

from torch import Tensor

from flowgrpo_rc.batch import PromptBatch
from flowgrpo_rc.calibration.choice import Settings, bound_of, carries
from flowgrpo_rc.calibration.tails import AGREEMENT, correlation, scored
from flowgrpo_rc.config.checks import check_plan
from flowgrpo_rc.config.tree import Config
from flowgrpo_rc.models.block_cache import saved_share
from flowgrpo_rc.rollout.config import RolloutConfig
from flowgrpo_rc.rollout.engine import ImageRequest, RolloutEngine
from flowgrpo_rc.training.tasks.image import ImageTask

EVERY = (2, 3, 4)  # the values of rollout.cache.every that are tried


class CacheTrial(NamedTuple):
    """A setting of `rollout.cache`, and what its samples are worth."""

    every: int
    window: bool
    saved: float  # share of the block evaluations of a sample
    agreement: float  # correlation of its advantages with those of all blocks; nan for none
    mismatch: float  # mean |log-prob of the trainer - of the rollout|, before any update
    carried: bool  # whether the loss makes room for it


def settings_to_try(rollout: RolloutConfig) -> list[RolloutConfig]:
    """Returns the settings with each cache, the one that saves most first, none twice."""
    tried: dict[tuple[int, ...], RolloutConfig] = {}
    for every, window in product(EVERY, (False, True)):
        setting = replace(rollout, cache=replace(rollout.cache, every=every, window=window))
        tried.setdefault(setting.cached_steps(), setting)
    tried.pop((), None)
    return [tried[steps] for steps in sorted(tried, key=len, reverse=True)]


def check_cache(config: Config) -> None:
    """Raises ValueError if the engine or the model has nothing to use again."""
    most = settings_to_try(config.rollout)[:1]
    if not most:
        raise ValueError(
            f"--cache: a sample has {config.rollout.evaluations()} evaluation(s), so there is none "
            "to use again; raise rollout.pipeline.num_inference_steps"
        )
    check_plan(replace(config, rollout=most[0]), 1)


def try_caches(
    config: Config,
    task: ImageTask,
    engine: RolloutEngine[ImageRequest],
    prompts: PromptBatch,
) -> list[CacheTrial]:
    """Samples the prompts once with all blocks and once with each cache."""
    rollout, micro = config.rollout, config.actor.ppo_micro_batch_size_per_gpu
    blocks, steps = tuple(rollout.cache.blocks), rollout.evaluations()
    trials = []
    with scored(config, task, engine, prompts) as sampled:
        own, _ = sampled(cached_steps=(), cached_blocks=())
        for setting in settings_to_try(rollout):
            cached = setting.cached_steps()
            advantages, batch = sampled(cached_steps=cached, cached_blocks=blocks)
            measured = task.policy.measure(batch, micro)
            assert isinstance(batch.rollout_log_probs, Tensor)
            differences = measured.log_probs.double() - batch.rollout_log_probs.double()
            trials.append(
                CacheTrial(
                    every=setting.cache.every,
                    window=setting.cache.window,
                    saved=saved_share(task.model.network, blocks, len(cached), steps),
                    agreement=correlation(own, advantages),
                    mismatch=differences.abs().mean().item(),
                    carried=carries(config, bound_of(config, differences, measured)),
                )
            )
    return trials


def cheapest(trials: Sequence[CacheTrial]) -> CacheTrial | None:
    """Returns the setting that saves most and agrees, the better of two such; None for none."""
    good = [trial for trial in trials if trial.agreement >= AGREEMENT and trial.carried]
    return max(good, key=lambda trial: (trial.saved, trial.agreement), default=None)


def with_cache(settings: Settings, trials: Sequence[CacheTrial]) -> Settings:
    """Returns the settings with the cache that `cheapest` finds, and a sentence about it."""
    found = cheapest(trials)
    chosen: dict[str, Any] = {}
    note = f"No cache has advantages that agree by {AGREEMENT} and a mismatch that is carried."
    if found is not None:
        chosen = {"rollout.cache.every": found.every, "rollout.cache.window": found.window}
        note = (
            f"A sample does with {1 - found.saved:.0%} of its block evaluations: the correlation "
            f"of advantages is {found.agreement:.3f}, and the mismatch {found.mismatch:.1e}."
        )
    return replace(settings, values=settings.values | chosen, notes=[*settings.notes, note])
