"""Makes what the samples of a step come from: engines, here or in workers, or saved files."""

import dataclasses
import logging
import os
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from flowgrpo_rc.assembly.task import load
from flowgrpo_rc.config.tree import Config
from flowgrpo_rc.data.prompts import PromptSampler
from flowgrpo_rc.distributed.numerics import set_numerics
from flowgrpo_rc.distributed.processes import Processes
from flowgrpo_rc.models.base import TrainableModel
from flowgrpo_rc.models.lora import add_lora
from flowgrpo_rc.plugins import build, load_class
from flowgrpo_rc.rewards.manager import RewardManager
from flowgrpo_rc.rollout.config import PACKAGE
from flowgrpo_rc.rollout.engine import RolloutEngine
from flowgrpo_rc.spec.check_engine import ENGINE_KWARGS
from flowgrpo_rc.spec.machine import device_of
from flowgrpo_rc.spec.run_spec import RunSpec, engine_options
from flowgrpo_rc.training.advantages import AdvantageEstimator
from flowgrpo_rc.training.sources.ahead import AheadSource
from flowgrpo_rc.training.sources.engine import EngineSource
from flowgrpo_rc.training.sources.filtered import FilteredSource
from flowgrpo_rc.training.sources.redrawn import RedrawnSource
from flowgrpo_rc.training.sources.replay import ReplaySource
from flowgrpo_rc.training.sources.source import RolloutSource
from flowgrpo_rc.training.tasks.task import Task
from flowgrpo_rc.workers.cluster import PoolSettings, start_workers

logger = logging.getLogger(__name__)


def make_source(
    spec: RunSpec,
    task: Task,
    sampler: PromptSampler,
    rewards: RewardManager,
    processes: Processes,
    *,
    first_step: int,
) -> RolloutSource:
    """Makes the engine of `rollout.name`, here or in workers, or reads `data.replay_dir`."""
    config = spec.config
    if config.data.replay_dir is not None:
        folder = Path(config.data.replay_dir).expanduser()
        terms = rewards.weights if config.algorithm.adv_estimator == "gdpo" else ()
        return ReplaySource(
            folder, task, processes, config.rollout, samples=spec.samples_per_step, terms=terms
        )
    rollout = config.rollout
    if rollout.workers:
        engine = make_workers(spec, processes)
    else:
        # Each engine with a pipeline of its own loads it whole on the host.
        alone = nullcontext() if spec.engine_class.copies_network else processes.in_turn()
        with alone:
            engine = make_engine(spec.engine_class, spec.engine_options, task.model)
    filters = config.algorithm.filter_groups.enable
    kind: Any = partial(FilteredSource, algorithm=config.algorithm) if filters else EngineSource
    source: EngineSource = kind(
        engine,
        task,
        sampler,
        rewards,
        processes,
        rollout,
        mini_batch_size=config.actor.ppo_mini_batch_size,
        seed=config.trainer.seed,
    )
    if rollout.redraw:
        return _redrawn(spec, source, processes)
    if rollout.staleness == 0:
        return source
    if rollout.workers == 0:
        logger.warning(
            "rollout.staleness=%d without workers: steps are sampled with older weights, and no "
            "time is saved. Set rollout.workers to sample beside the training",
            rollout.staleness,
        )
    steps = range(max(1, first_step), config.trainer.total_training_steps + 1)
    return AheadSource(source, rollout.staleness, steps=steps)


def _redrawn(spec: RunSpec, scouts: EngineSource, processes: Processes) -> RedrawnSource:
    """Adds an engine in the trainer's precision that draws chosen samples again."""
    rollout = spec.trained_rollout
    task: Any = scouts.task
    options = engine_options(rollout, spec.chunk_size)
    exact = dataclasses.replace(
        scouts,
        engine=make_engine(spec.engine_class, options, task.model),
        task=dataclasses.replace(task, config=rollout),
        config=rollout,
    )
    train_n = spec.trained_n or 0  # it has been checked that there is a number
    algorithm = spec.config.algorithm
    estimator = AdvantageEstimator(algorithm, scouts.rewards.weights, None, processes.sum)
    return RedrawnSource(scouts, exact, estimator, train_n)


def make_engine(
    engine_class: type[RolloutEngine[Any]], options: Mapping[str, object], model: TrainableModel
) -> RolloutEngine[Any]:
    """Makes an engine for a model whose network has its LoRA."""
    engine: RolloutEngine[Any] = build(
        engine_class, {**options, "model": model, "network": model.network}, ENGINE_KWARGS
    )
    return engine


def make_workers(spec: RunSpec, processes: Processes) -> RolloutEngine[Any]:
    """Starts the workers of `rollout.workers`, each with an engine of its own."""
    rollout, size = spec.config.rollout, spec.chunk_size
    chunks = -(-spec.samples_per_step // size) * processes.count
    if chunks < rollout.workers:
        logger.warning(
            "rollout.workers=%d, but a step has %d chunk(s) of rollout.micro_batch_size_per_gpu=%d "
            "samples: a lower number lets more workers share a step",
            *(rollout.workers, chunks, size),
        )
    settings = PoolSettings(
        num_workers=rollout.workers,
        num_cpus=rollout.cpus_per_worker,
        num_gpus=spec.gpus_per_worker,
        timeout_s=rollout.worker_timeout_s,
        max_restarts=rollout.max_restarts,
        staleness=rollout.staleness,
        chunk_size=size,
        in_turn=processes.device.type == "cuda",
    )
    engine = partial(engine_alone, spec.config, spec.engine_options, Path.cwd())
    return start_workers(engine, settings, processes, address=rollout.ray_address)


def engine_alone(config: Config, options: Mapping[str, object], folder: Path) -> RolloutEngine[Any]:
    """Loads the model and makes its engine, in a process that does not train. Relative paths lead
    from `folder`, the trainer's working directory.
    """
    if folder.is_dir():  # another machine may lack it
        os.chdir(folder)
    set_numerics(deterministic=config.trainer.deterministic, tf32=config.trainer.tf32)
    model = load(config.model, device_of(config))
    add_lora(model, config.model, config.trainer.seed)
    return make_engine(load_class(PACKAGE, config.rollout.name, RolloutEngine), options, model)
