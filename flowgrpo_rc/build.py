"""The parts of a run, built from its configuration: model, policy, engine, correction, loss,
update.
"""

import dataclasses
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, InitProcessGroupKwargs

from flowgrpo_rc.algorithms.algorithm import Algorithm
from flowgrpo_rc.algorithms.diffusion_nft.algorithm import ForwardProcess
from flowgrpo_rc.algorithms.diffusion_nft.graph import VelocityGraph
from flowgrpo_rc.algorithms.policy_gradient.images import DiffusionObjective
from flowgrpo_rc.algorithms.policy_gradient.modes import make_mode
from flowgrpo_rc.algorithms.policy_gradient.text import TokenObjective
from flowgrpo_rc.config.tree import Config
from flowgrpo_rc.correction.auto_bands import AutoBands
from flowgrpo_rc.correction.correct import Corrector
from flowgrpo_rc.data.prompts import PromptSampler
from flowgrpo_rc.distributed.numerics import set_numerics
from flowgrpo_rc.distributed.processes import Processes
from flowgrpo_rc.distributed.sharding import resolve_strategy, shard_frozen_weights
from flowgrpo_rc.evaluation.held_out import Evaluator
from flowgrpo_rc.evaluation.suite import Suite
from flowgrpo_rc.evaluation.suite_runner import SuiteRunner
from flowgrpo_rc.losses.auto_clip import AutoClip
from flowgrpo_rc.losses.base import TokenLoss
from flowgrpo_rc.models.base import load_model
from flowgrpo_rc.models.causal_lm import load_causal_lm
from flowgrpo_rc.models.lora import add_lora, lora_parameters, reference_policy
from flowgrpo_rc.models.networks import transformers
from flowgrpo_rc.monitoring.expected_mismatch import (
    ENOUGH,
    LEAST,
    ExpectedMismatch,
    unquantized_share,
)
from flowgrpo_rc.monitoring.health import HealthMonitor
from flowgrpo_rc.monitoring.health_rules import Setup
from flowgrpo_rc.monitoring.mismatch import MismatchMonitor
from flowgrpo_rc.plugins import build, load_class
from flowgrpo_rc.policies.flow import FlowPolicy
from flowgrpo_rc.policies.token import TokenPolicy
from flowgrpo_rc.records.best import BestEvaluation
from flowgrpo_rc.records.console import Console
from flowgrpo_rc.records.metrics_file import MetricsFile
from flowgrpo_rc.records.rejected import RejectedSamples
from flowgrpo_rc.records.run_folder import RunFolder
from flowgrpo_rc.records.run_log import Observer, RunLog
from flowgrpo_rc.records.speed import SpeedWatch
from flowgrpo_rc.records.trackers import Trackers, accelerate_loggers
from flowgrpo_rc.rewards.manager import RewardManager, needs_samples
from flowgrpo_rc.rollout.config import PACKAGE
from flowgrpo_rc.rollout.engine import RolloutEngine
from flowgrpo_rc.spec.check_engine import ENGINE_KWARGS
from flowgrpo_rc.spec.check_folder import check_output
from flowgrpo_rc.spec.check_inputs import Prompts
from flowgrpo_rc.spec.machine import device_of, limit_threads
from flowgrpo_rc.spec.run_spec import RunSpec, engine_options
from flowgrpo_rc.training.advantages import AdvantageEstimator
from flowgrpo_rc.training.first_pass import encode_ahead, make_prompt_cache
from flowgrpo_rc.training.journal import Journal
from flowgrpo_rc.training.sources.ahead import AheadSource
from flowgrpo_rc.training.sources.engine import EngineSource
from flowgrpo_rc.training.sources.filtered import FilteredSource
from flowgrpo_rc.training.sources.redrawn import RedrawnSource
from flowgrpo_rc.training.sources.replay import ReplaySource
from flowgrpo_rc.training.sources.source import RolloutSource
from flowgrpo_rc.training.state import RunState
from flowgrpo_rc.training.tasks.image import ImageTask
from flowgrpo_rc.training.tasks.task import Task
from flowgrpo_rc.training.tasks.text import TextTask
from flowgrpo_rc.training.trainer import Trainer
from flowgrpo_rc.training.update import PolicyUpdate
from flowgrpo_rc.workers.cluster import PoolSettings, start_workers

logger = logging.getLogger(__name__)


def assemble(
    spec: RunSpec,
    folder: RunFolder,
    processes: Processes,
    prompts: Prompts,
    *,
    first_step: int,
    log: RunLog | None = None,
) -> Trainer:
    """Loads the model and makes the trainer of a run, whose settings have been checked."""
    config = spec.config
    log = log or make_log(config, folder, processes, first_step=first_step)
    sampler, held_out, suites = prompts

    task = make_task(spec, processes)
    network = task.model.network
    if config.model.prompt_cache is not None:
        steps = range(max(1, first_step), config.trainer.total_training_steps + 1)
        encode_ahead(task, prompts, processes, steps, config.actor.ppo_mini_batch_size)
    check_output(config, sum(p.numel() for p in lora_parameters(network).values()))
    rewards = RewardManager(config.reward, spec.rewards)
    # An engine that copies the network has to see it whole, before it is sharded.
    samples_here = config.data.replay_dir is None and config.rollout.workers == 0
    copied = samples_here and spec.engine_class.copies_network
    if not copied:
        shard(config, network, processes)
    source = make_source(spec, task, sampler, rewards, processes, first_step=first_step)
    if copied:
        shard(config, network, processes)

    algorithm = make_algorithm(spec, task, processes)
    update = PolicyUpdate(algorithm, config.actor, processes, total_updates=spec.total_updates)
    health = make_health(spec)
    rejected = RejectedSamples(config.algorithm.rollout_correction, spec.rules, processes.count)
    best = BestEvaluation(MetricsFile(folder.metrics).rows())
    keep = config.trainer.max_checkpoints_to_keep
    return Trainer(
        config=config.trainer,
        processes=processes,
        task=task,
        source=source,
        rewards=rewards,
        algorithm=algorithm,
        advantages=AdvantageEstimator(
            config.algorithm,
            rewards.weights,
            None if config.rollout.redraw else spec.trained_n,
            processes.sum,
        ),
        update=update,
        mini_batch_size=spec.samples_per_mini_batch,
        may_be_stale=config.rollout.staleness > 0,
        evaluator=Evaluator(task.sample, held_out, config.rollout.val_kwargs, rewards),
        suites=[make_suite(suite, spec, task) for suite in suites],
        state=RunState(folder.checkpoints, keep, processes, update, algorithm, health, source),
        journal=Journal(folder, log, health, rejected, processes, best),
    )


def make_suite(suite: Suite, spec: RunSpec, task: Task) -> SuiteRunner:
    """Makes what asks a suite of the task's model, and of it without its LoRA."""
    config = spec.config
    asked: Any = task  # a dataclass, which keeps prompts encoded as its sampler needs them
    if suite.sampler:
        asked = dataclasses.replace(asked, config=suite.applied(config.rollout))
    return SuiteRunner(
        suite,
        asked.sample,
        partial(reference_policy, task.model.network),
        batch_size=config.rollout.val_kwargs.batch_size,
        protocol=suite.protocol(config.rollout, text=spec.is_text),
    )


def make_algorithm(spec: RunSpec, task: Task, processes: Processes) -> Algorithm[Any]:
    """Makes the algorithm that the loss belongs to."""
    config = spec.config
    section = config.actor.diffusion_loss
    micro_batch_size = config.actor.ppo_micro_batch_size_per_gpu
    if spec.forward_loss is not None:
        assert isinstance(task.policy, FlowPolicy)
        return ForwardProcess(
            VelocityGraph(task.policy),
            spec.forward_loss,
            adv_clip_max=section.adv_clip_max,
            micro_batch_size=micro_batch_size,
        )
    objective: TokenObjective | DiffusionObjective
    if isinstance(spec.loss, TokenLoss):
        objective = TokenObjective(spec.loss_config, spec.loss, spec.rules)
    else:
        objective = DiffusionObjective(spec.loss_config, spec.step_loss, spec.rules)
    return make_mode(
        Corrector(config.algorithm.rollout_correction, spec.rules),
        own_forwards=spec.why_recompute is None,
        keep_means=spec.loss_needs_means,
        policy=task.policy,
        terms=objective.terms,
        processes=processes,
        monitor=make_monitor(spec, task, processes),
        micro_batch_size=micro_batch_size,
        auto_bands=make_auto_bands(spec, processes),
        auto_clip=make_auto_clip(spec, processes),
    )


def shard(config: Config, network: Any, processes: Processes) -> None:
    """Spreads the frozen weights over the processes, if `trainer.strategy` asks for it."""
    strategy = resolve_strategy(config.trainer.strategy)
    if processes.count > 1 and strategy == "fsdp2":
        timeout = timedelta(seconds=config.trainer.timeout_s)
        shard_frozen_weights(transformers(network).values(), processes.device, timeout)


def make_console(config: Config, processes: Processes, *, quiet: bool = False) -> Console:
    """Makes what tells the user of the run: on the main process, and there unless `quiet`."""
    return Console(
        total_steps=config.trainer.total_training_steps,
        quiet=quiet or not processes.is_main,
        show_steps="console" in config.trainer.logger,
    )


def make_log(
    config: Config,
    folder: RunFolder,
    processes: Processes,
    *,
    first_step: int,
    console: Console | None = None,
    observers: Sequence[Observer] = (),
) -> RunLog:
    """Makes what writes the numbers of a step down, and calls the observers on the main process."""
    trackers = Trackers(
        processes.accelerator,
        project_name=config.trainer.project_name,
        experiment_name=config.trainer.experiment_name,
        run_dir=folder.root,
        config=dataclasses.asdict(config),
        first_step=first_step,
    )
    on_cpu = processes.device.type == "cpu"
    speed = SpeedWatch(torch.get_num_threads() if on_cpu else None)
    console = console or make_console(config, processes)
    return RunLog(folder, console, trackers, speed, observers)


def make_processes(config: Config, *, quiet: bool = False) -> Processes:
    """Returns accelerate's view of this process, on the device of `device_of`.

    ValueError if an earlier run of this Python session had another device or mixed precision, which
    accelerate keeps for the whole session.
    """
    resolve_strategy(config.trainer.strategy)
    on_cpu = device_of(config).type == "cpu"
    set_numerics(deterministic=config.trainer.deterministic, tf32=config.trainer.tf32)
    if on_cpu:
        limit_threads(quiet=quiet)
    try:
        accelerator = Accelerator(
            cpu=on_cpu,
            mixed_precision=config.trainer.mixed_precision,
            log_with=accelerate_loggers(config.trainer.logger) or None,
            project_dir=config.trainer.output_dir,
            kwargs_handlers=[
                InitProcessGroupKwargs(timeout=timedelta(seconds=config.trainer.timeout_s))
            ],
        )
    except ValueError as error:
        raise ValueError(
            f"trainer.mixed_precision={config.trainer.mixed_precision}, "
            f"trainer.device={config.trainer.device}: accelerate refuses them ({error})"
        ) from error
    if not accelerator.is_main_process:
        logging.getLogger("flowgrpo_rc").setLevel(logging.ERROR)
    return Processes(accelerator)


def make_task(spec: RunSpec, processes: Processes) -> Task:
    """Loads the model, puts its LoRA on, and wraps both in what the trainer asks for."""
    config = spec.config
    checkpointing, seed = config.model.gradient_checkpointing, config.trainer.seed
    rollout, tf32 = config.rollout, config.trainer.tf32
    autocast = processes.accelerator.autocast
    load: Any = load_causal_lm if spec.is_text else load_model
    with processes.in_turn():
        model = load(config.model, processes.device)
    network = add_lora(model, config.model, seed)
    if spec.is_text:
        tokens = TokenPolicy(model, network, autocast=autocast, checkpoint_gradients=checkpointing)
        return TextTask(model, tokens, rollout, tf32=tf32)
    if config.model.prompt_cache is not None:
        model.prompt_cache = make_prompt_cache(
            config.model, model, processes.device, tf32=config.trainer.tf32
        )
    if checkpointing:
        for part in transformers(network).values():
            part.enable_gradient_checkpointing()
    policy = FlowPolicy(
        model, network, autocast=autocast, steps_per_forward=config.actor.steps_per_forward
    )
    return ImageTask(
        model,
        policy,
        rollout,
        seed,
        keep_means=spec.keeps_means,
        decode=needs_samples(spec.rewards),
        seeded=config.data.replay_dir is None and spec.engine_class.draws_seed_noise,
        tf32=tf32,
    )


def make_auto_bands(spec: RunSpec, processes: Processes) -> AutoBands | None:
    """Makes the bands of the criteria that have an `auto` threshold; None if there are none."""
    config = spec.config
    bands = () if config.algorithm.rollout_correction.custom_correction else spec.rules.auto
    if not bands:
        return None
    return AutoBands(
        bands,
        config.rollout.pipeline.num_inference_steps,
        processes.device,
        num_mini_batches=config.data.train_batch_size // config.actor.ppo_mini_batch_size,
    )


def make_auto_clip(spec: RunSpec, processes: Processes) -> AutoClip | None:
    """Makes the bound of a loss that follows the mismatch; None if the bound is a number."""
    config = spec.config
    section = config.actor.diffusion_loss
    if spec.is_text or not section.auto:
        return None
    (deviations,) = section.auto.values()
    return AutoClip(
        spec.step_loss,
        deviations,
        centered=bool(config.algorithm.rollout_correction.centered),
        num_steps=config.rollout.pipeline.num_inference_steps,
        device=processes.device,
    )


def make_monitor(spec: RunSpec, task: Task, processes: Processes) -> MismatchMonitor:
    """Makes what measures the mismatch, and what the precisions explain of it for fresh samples."""
    config = spec.config
    expected = None
    size = spec.expected_mismatch
    if size is not None:
        switched = config.trainer.mixed_precision == "no"
        autocast = partial(torch.autocast, processes.device.type, torch.bfloat16, enabled=switched)
        in_bf16 = config.model.dtype == "bf16"
        expected = ExpectedMismatch(
            task.policy,
            task.policy.rounded_otherwise(None if in_bf16 else autocast),
            processes,
            size=size,
            least=LEAST[config.model.kind],
            enough=ENOUGH[config.model.kind],
            micro_batch_size=config.actor.ppo_micro_batch_size_per_gpu,
        )
    return MismatchMonitor(
        task.policy,
        processes,
        clip_ratio=spec.clip_ratio,
        expected=expected,
        metric_names=config.algorithm.rollout_correction.metric_names,
    )


def make_health(spec: RunSpec) -> HealthMonitor:
    """Makes what watches the metrics and warns."""
    dtype = spec.trained_rollout.spec().dtype
    precisions = (dtype, spec.config.model.dtype, spec.config.trainer.mixed_precision)
    setup = Setup.of(
        spec.correction,
        spec.rules,
        text=spec.is_text,
        fresh=spec.fresh,
        unquantized=unquantized_share(*precisions),
    )
    return HealthMonitor(setup)


def make_source(
    spec: RunSpec,
    task: Task,
    sampler: PromptSampler,
    rewards: RewardManager,
    processes: Processes,
    *,
    first_step: int,
) -> RolloutSource:
    """The engine that `rollout.name` names, here or in workers; or files of `data.replay_dir`."""
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
    engine_class: type[RolloutEngine[Any]], options: Mapping[str, Any], model: Any
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


def engine_alone(config: Config, options: Mapping[str, Any], folder: Path) -> RolloutEngine[Any]:
    """Loads the model and makes its engine, in a process that does not train. Relative paths lead
    from `folder`, the trainer's working directory.
    """
    if folder.is_dir():  # another machine may lack it
        os.chdir(folder)
    set_numerics(deterministic=config.trainer.deterministic, tf32=config.trainer.tf32)
    load: Any = load_causal_lm if config.model.kind == "causal_lm" else load_model
    model = load(config.model, device_of(config))
    add_lora(model, config.model, config.trainer.seed)
    return make_engine(load_class(PACKAGE, config.rollout.name, RolloutEngine), options, model)
