"""Finds cheaper rollouts: the same samples with a shorter tail, or with blocks used again.

Rewards see the final image. A cheaper rollout makes another one, and what training takes from it is
its advantage. So rollouts are compared by the correlation of their advantages with those of the
full one, from the same noise. Where steps of the window are cached, their mismatch has to be one
that the configured loss carries in bypass mode.
"""

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from flowgrpo_rc.batch import DiffusionBatch, PromptBatch, SamplerSpec
from flowgrpo_rc.calibration.choice import Settings, bound_of, carries
from flowgrpo_rc.config.tree import Config
from flowgrpo_rc.core.metrics import MetricBag
from flowgrpo_rc.core.random import derive_seed
from flowgrpo_rc.core.reduce import identity
from flowgrpo_rc.core.schedule import TAILS
from flowgrpo_rc.models.block_cache import saved_share
from flowgrpo_rc.rewards.groups import Groups
from flowgrpo_rc.rewards.manager import RewardManager
from flowgrpo_rc.rollout.concat import concat
from flowgrpo_rc.rollout.config import RolloutConfig
from flowgrpo_rc.rollout.engine import ImageRequest, RolloutEngine
from flowgrpo_rc.spec.checks import check_plan
from flowgrpo_rc.spec.run_spec import RunSpec
from flowgrpo_rc.training.advantages import AdvantageEstimator
from flowgrpo_rc.training.tasks.image import ImageTask

AGREEMENT = 0.95  # the least correlation of a rollout that is recommended
EVERY = (2, 3, 4)  # the values of rollout.cache.every that are tried


class Saving(NamedTuple):
    """A cheaper rollout that was tried, and what its samples are worth."""

    settings: Mapping[str, object]  # that make it, by key
    saved: float  # share of the block evaluations of a sample
    agreement: float  # correlation of its advantages with those of the full rollout; nan for none
    mismatch: float = 0.0  # mean |log-prob of the trainer - of the rollout|, before any update
    carried: bool = True  # whether the loss makes room for it

    def record(self) -> dict[str, object]:
        """Returns it for calibration.json and for a table."""
        settings = {key.rpartition(".")[2]: value for key, value in self.settings.items()}
        return settings | {name: getattr(self, name) for name in self._fields[1:]}


def cheapest(savings: Sequence[Saving]) -> Saving | None:
    """Returns the cheapest that agrees and is carried, the better of two such; None for none."""
    good = [saving for saving in savings if saving.agreement >= AGREEMENT and saving.carried]
    return max(good, key=lambda saving: (saving.saved, saving.agreement), default=None)


def with_cheapest(settings: Settings, savings: Sequence[Saving]) -> Settings:
    """Returns the settings with the cheapest rollout of some, and a sentence about it."""
    best = cheapest(savings)
    if best is None:
        keys = " and ".join(savings[0].settings)
        note = f"advantages that correlate by {AGREEMENT} and a mismatch that is carried"
        return settings.extended({}, f"No values of {keys} have {note}.")
    values = ", ".join(f"{key}={value}" for key, value in best.settings.items())
    note = (
        f"{values} saves {best.saved:.0%} of the block evaluations of a sample: the correlation of "
        f"advantages is {best.agreement:.3f}, and the mismatch {best.mismatch:.1e}."
    )
    return settings.extended(best.settings, note)


def check_tail(config: Config) -> None:
    """Raises ValueError if no step lies behind the window."""
    if config.rollout.window()[2] == config.rollout.pipeline.num_inference_steps:
        raise ValueError(
            "--tail: no step lies behind rollout.algo.sde_window_range, so there is no tail to "
            "shorten; end the range earlier"
        )


def caches_to_try(rollout: RolloutConfig) -> list[RolloutConfig]:
    """Returns the settings with each cache, the one that saves most first, none twice."""
    by_steps: dict[tuple[int, ...], RolloutConfig] = {}
    for every, window in product(EVERY, (False, True)):
        setting = replace(rollout, cache=replace(rollout.cache, every=every, window=window))
        by_steps.setdefault(setting.cached_steps(), setting)
    by_steps.pop((), None)
    return [by_steps[steps] for steps in sorted(by_steps, key=len, reverse=True)]


def check_cache(spec: RunSpec) -> None:
    """Raises ValueError if the engine or the model has nothing to use again."""
    config = spec.config
    settings = caches_to_try(config.rollout)
    if not settings:
        raise ValueError(
            f"--cache: a sample has {config.rollout.evaluations()} evaluation(s), so there is none "
            "to use again; raise rollout.pipeline.num_inference_steps"
        )
    check_plan(spec.with_sections(rollout=settings[0]))


class Scorer:
    """Samples prompts again and again from the same noise, and scores them; it has to be closed."""

    def __init__(
        self,
        run: RunSpec,
        task: ImageTask,
        engine: RolloutEngine[ImageRequest],
        prompts: PromptBatch,
    ) -> None:
        config = run.config
        self._run = run
        self._config = config
        self._task = task
        self._engine = engine
        rows = product(prompts.slots, range(config.rollout.n))
        seeds = [derive_seed(config.trainer.seed, "tails", *row) for row in rows]
        self._request = task.request(prompts, seeds)
        self._rewards = RewardManager(config.reward, run.rewards)
        weights = self._rewards.weights
        self._estimator = AdvantageEstimator(config.algorithm, weights, None, identity)
        self.close = self._rewards.close

    def tails(self) -> list[Saving]:
        """Samples once with the schedule's own tail and once with each shorter one, those with the
        fewest evaluations first.
        """
        steps = self._config.rollout.pipeline.num_inference_steps
        start = self._config.rollout.window()[2]
        spec = self._request.spec
        tails = [(tail, count) for count in range(1, steps - start + 1) for tail in TAILS]
        tails.remove(("euler", steps - start))
        full, _ = self._sample(replace(spec, tail="euler", tail_start=start, tail_steps=None))
        savings = []
        for tail, count in tails:
            shorter, _ = self._sample(replace(spec, tail=tail, tail_start=start, tail_steps=count))
            settings = {"rollout.algo.tail": tail, "rollout.algo.tail_steps": count}
            saved = 1 - (start + count) / steps
            savings.append(Saving(settings, saved, correlation(full, shorter)))
        return savings

    def caches(self) -> list[Saving]:
        """Samples once with all blocks and once with each cache."""
        rollout = self._config.rollout
        spec = self._request.spec
        full, _ = self._sample(replace(spec, cached_steps=()))
        savings = []
        for setting in caches_to_try(rollout):
            cache = setting.cache
            steps = setting.cached_steps()
            advantages, batch = self._sample(replace(spec, cached_steps=steps))
            micro_batch_size = self._config.actor.ppo_micro_batch_size_per_gpu
            measured = self._task.policy.measure(batch, micro_batch_size)
            assert isinstance(batch.rollout_log_probs, Tensor)
            differences = measured.log_probs.double() - batch.rollout_log_probs.double()
            network = self._task.model.network
            saving = Saving(
                {"rollout.cache.every": cache.every, "rollout.cache.window": cache.window},
                saved_share(network, len(steps), rollout.evaluations()),
                correlation(full, advantages),
                differences.abs().mean().item(),
                carries(self._run, bound_of(self._run, differences, measured)),
            )
            savings.append(saving)
        return savings

    def _sample(self, spec: SamplerSpec) -> tuple[Tensor, DiffusionBatch]:
        """Returns the advantages as training would compute them, [B], and the batch."""
        rewards = self._rewards
        batches = []
        handles = []
        for chunk in self._engine.generate(replace(self._request, spec=spec)):
            batches.append(chunk.batch)
            groups = Groups(chunk.batch.group.tolist(), self._config.rollout.n)
            handles.append(rewards.submit(chunk.samples, chunk.prompts, chunk.latents, groups))
        batch = concat(batches)
        assert isinstance(batch, DiffusionBatch)
        return self._estimator.of(batch, rewards.collect(handles), MetricBag()), batch


def try_savings(
    run: RunSpec,
    task: ImageTask,
    engine: RolloutEngine[ImageRequest],
    prompts: PromptBatch,
    *,
    tail: bool,
    cache: bool,
) -> tuple[list[Saving], list[Saving]]:
    """Tries shorter tails, caches, both or neither."""
    if not (tail or cache):
        return [], []
    with closing(Scorer(run, task, engine, prompts)) as scorer:
        return scorer.tails() if tail else [], scorer.caches() if cache else []


def correlation(left: Tensor, right: Tensor) -> float:
    """Returns Pearson's correlation of two rows of numbers, [B]; nan if one of them is constant."""
    return torch.corrcoef(torch.stack([left, right]).double())[0, 1].item()
