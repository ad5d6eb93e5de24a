"""The parts of a run, built from its configuration: model, policy, engine, correction, loss,
update.
"""

from __future__ import annotations

import dataclasses
import logging
import shutil
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, InitProcessGroupKwargs

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.config.tree import Config
from flowgrpo_rc.correction.auto_bands import AutoBands
from flowgrpo_rc.data.prompts import PromptSampler
from flowgrpo_rc.distributed.processes import Processes
from flowgrpo_rc.distributed.sharding import resolve_strategy, shard_frozen_weights
from flowgrpo_rc.models.base import absent_components, adapter_of, load_model
from flowgrpo_rc.models.causal_lm import load_causal_lm
from flowgrpo_rc.models.lora import add_lora, lora_parameters
from flowgrpo_rc.monitoring.decisions import Decisions
from flowgrpo_rc.monitoring.expected_mismatch import LEAST, ExpectedMismatch
from flowgrpo_rc.monitoring.health import HealthMonitor
from flowgrpo_rc.monitoring.mismatch import MismatchMonitor
from flowgrpo_rc.plugins import build, check_options, load_class
from flowgrpo_rc.policies.flow import FlowPolicy
from flowgrpo_rc.policies.token import TokenPolicy
from flowgrpo_rc.records.console import Console
from flowgrpo_rc.records.rejected import RejectedSamples
from flowgrpo_rc.records.run_folder import RunFolder
from flowgrpo_rc.records.trackers import Trackers, accelerate_loggers
from flowgrpo_rc.rewards.manager import RewardManager, check_kind, needs_samples
from flowgrpo_rc.rollout.engine import RolloutEngine
from flowgrpo_rc.rollout.quantization import check_device
from flowgrpo_rc.training.evaluation import Evaluator
from flowgrpo_rc.training.old_policy import OldPolicy
from flowgrpo_rc.training.sources.ahead import AheadSource
from flowgrpo_rc.training.sources.engine import EngineSource
from flowgrpo_rc.training.sources.replay import ReplaySource
from flowgrpo_rc.training.sources.source import RolloutSource
from flowgrpo_rc.training.tasks.image import ImageTask
from flowgrpo_rc.training.tasks.task import Task
from flowgrpo_rc.training.tasks.text import TextTask
from flowgrpo_rc.training.trainer import Components
from flowgrpo_rc.training.update import PolicyUpdate

ROLLOUT_PACKAGE, ENGINE_KWARGS = "flowgrpo_rc.rollout", "rollout.engine_kwargs"
COMPILERS = ("g++", "clang++")


def assemble(
    config: Config,
    folder: RunFolder,
    processes: Processes,
    prompts: tuple[PromptSampler, list[Prompt]],
    *,
    first_step: int,
) -> Components:
    """Load the model and build every part of a run; if it is to be sharded, then once no engine
    needs it whole.
    """
    sampler, held_out = prompts
    check_machine(config, processes.device)
    task = make_task(config, processes)
    network = task.model.network
    task.check_prompts([*sampler.prompts, *held_out])
    config.check_output(num_parameters=sum(p.numel() for p in lora_parameters(network).values()))
    rewards = RewardManager(config.reward)
    sharded = processes.count > 1 and resolve_strategy(config.trainer.strategy) == "fsdp2"
    shard = partial(
        shard_frozen_weights, network, processes.device, timedelta(seconds=config.trainer.timeout_s)
    )
    copied = config.data.replay_dir is None and engine_of(config).copies_network
    if sharded and not copied:
        shard()
    source = make_source(config, task, sampler, rewards, processes, first_step=first_step)
    if sharded and copied:
        shard()
    correction, auto_bands = config.algorithm.rollout_correction, make_auto_bands(config, processes)
    floor, observations = make_floor(config, task, processes), Decisions()
    old_policy = None
    if not correction.bypass_mode:
        old_policy = make_old_policy(config, task, processes, auto_bands, floor, observations)
    return Components(
        config=config,
        processes=processes,
        folder=folder,
        task=task,
        source=source,
        rewards=rewards,
        floor=floor,
        update=PolicyUpdate(
            task.policy,
            config.actor,
            task.objective(config.loss()).terms,
            processes,
            total_updates=config.total_updates(),
            floor=floor,
            whole_windows=correction.bypass_level == "window",
            auto_bands=auto_bands if correction.bypass_mode else None,
            old_policy=old_policy,
            observations=observations if correction.bypass_mode else None,
        ),
        observations=observations,
        evaluator=Evaluator(task, held_out, config.rollout.val_kwargs, rewards),
        health=make_health(config),
        console=Console(
            total_steps=config.trainer.total_training_steps,
            is_main=processes.is_main,
            show_steps="console" in config.trainer.logger,
        ),
        trackers=Trackers(
            processes.accelerator,
            project_name=config.trainer.project_name,
            experiment_name=config.trainer.experiment_name,
            run_dir=folder.root,
            config=dataclasses.asdict(config),
            first_step=first_step,
        ),
        auto_bands=auto_bands,
        old_policy=old_policy,
        rejected=RejectedSamples(
            folder.rejected, correction, rank=processes.rank, count=processes.count
        ),
    )


def make_processes(config: Config) -> Processes:
    """Accelerate's view of this process; the CPU without CUDA or with `trainer.device=cpu`.

    Other accelerators are left alone: Apple's has no float64, which the metrics need.
    """
    resolve_strategy(config.trainer.strategy)
    accelerator = Accelerator(
        cpu=config.trainer.device == "cpu" or not torch.cuda.is_available(),
        mixed_precision=config.trainer.mixed_precision,
        log_with=accelerate_loggers(config.trainer.logger) or None,
        project_dir=config.trainer.output_dir,
        kwargs_handlers=[
            InitProcessGroupKwargs(timeout=timedelta(seconds=config.trainer.timeout_s))
        ],
    )
    if not accelerator.is_main_process:
        logging.getLogger("flowgrpo_rc").setLevel(logging.ERROR)
    return Processes(accelerator)


def make_task(config: Config, processes: Processes) -> Task:
    """Load the model, put its LoRA on, and wrap both in what the trainer asks for."""
    checkpointing, seed = config.model.gradient_checkpointing, config.trainer.seed
    if config.model.kind == "causal_lm":
        language = load_causal_lm(config.model, processes.device)
        network = add_lora(language, config.model, seed)
        tokens = TokenPolicy(
            language, network, autocast=processes.autocast, checkpoint_gradients=checkpointing
        )
        return TextTask(language, tokens, config.rollout)
    model = load_model(config.model, processes.device)
    for spec, key in (
        (config.rollout.spec(), "pipeline"),
        (config.rollout.held_out_spec(), "val_kwargs"),
    ):
        model.check(spec, f"rollout.{key}")
    network = add_lora(model, config.model, seed)
    if checkpointing:
        model.transformer.enable_gradient_checkpointing()
    policy = FlowPolicy(model, network, autocast=processes.autocast)
    decode = needs_samples(config.reward)
    return ImageTask(
        model, policy, config.rollout, seed, keep_means=config.keep_means(), decode=decode
    )


def make_auto_bands(config: Config, processes: Processes) -> AutoBands | None:
    """What follows the mismatch where a criterion has an `auto` band."""
    correction, num_steps = (
        config.algorithm.rollout_correction,
        config.rollout.pipeline.num_inference_steps,
    )
    bands = () if correction.custom_correction else correction.rules().auto
    return AutoBands(bands, num_steps, processes.device) if bands else None


def make_floor(config: Config, task: Task, processes: Processes) -> MismatchMonitor:
    """What measures the mismatch, with what the precisions explain of it, where samples are
    fresh.
    """
    correction, kind = config.algorithm.rollout_correction, config.model.kind
    expected, size = None, config.expected_mismatch()
    if size is not None:
        switched = config.trainer.mixed_precision == "no"
        autocast = partial(torch.autocast, processes.device.type, torch.bfloat16, enabled=switched)
        expected = ExpectedMismatch(
            task.policy,
            task.policy.nudged() if config.model.dtype == "bf16" else task.policy.under(autocast),
            processes,
            size=size,
            least=LEAST[kind],
            micro_batch_size=config.actor.ppo_micro_batch_size_per_gpu,
        )
    return MismatchMonitor(
        task.policy,
        processes,
        bypass=correction.bypass_mode,
        clip_ratio=config.clip_ratio(),
        expected=expected,
        metric_names=correction.metric_names,
    )


def make_health(config: Config) -> HealthMonitor:
    return HealthMonitor(
        config.effective_correction(), text=config.model.kind == "causal_lm", fresh=config.fresh()
    )


def make_old_policy(
    config: Config,
    task: Task,
    processes: Processes,
    auto_bands: AutoBands | None,
    floor: MismatchMonitor,
    observations: Decisions,
) -> OldPolicy:
    return OldPolicy(
        task.policy,
        config.algorithm.rollout_correction,
        processes,
        floor,
        micro_batch_size=config.actor.ppo_micro_batch_size_per_gpu,
        reuses=config.why_recompute() is None,
        keep_means=config.actor.diffusion_loss.needs_means,
        auto_bands=auto_bands,
        observations=observations,
    )


def make_source(
    config: Config,
    task: Task,
    sampler: PromptSampler,
    rewards: RewardManager,
    processes: Processes,
    *,
    first_step: int,
) -> RolloutSource:
    """The engine that `rollout.name` names, in a thread if it samples ahead, or the files of
    `data.replay_dir`.
    """
    if config.data.replay_dir is not None:
        folder = Path(config.data.replay_dir).expanduser()
        samples = config.samples_per_step(processes.count)
        terms = rewards.weights if config.algorithm.adv_estimator == "gdpo" else ()
        return ReplaySource(folder, task, processes, config.rollout, samples=samples, terms=terms)
    rollout, engine = config.rollout, make_engine(config, task)
    source = EngineSource(
        engine,
        task,
        sampler,
        rewards,
        processes,
        rollout,
        mini_batch_size=config.actor.ppo_mini_batch_size,
        seed=config.trainer.seed,
    )
    if rollout.staleness == 0:
        return source
    steps = range(max(1, first_step), config.trainer.total_training_steps + 1)
    return AheadSource(source, rollout.staleness, steps=steps, device=processes.device)


def make_engine(config: Config, task: Task) -> RolloutEngine[Any]:
    """The engine that `rollout.name` names, with the task's weights. ValueError where it refuses
    its options.
    """
    options = engine_options(config) | {"model": task.model, "network": task.model.network}
    engine: RolloutEngine[Any] = build(engine_of(config), options, ENGINE_KWARGS)
    return engine


def chunk_size(config: Config) -> int:
    """Samples of a forward while sampling."""
    return config.rollout.micro_batch_size_per_gpu or config.actor.ppo_micro_batch_size_per_gpu


def engine_of(config: Config) -> type[RolloutEngine[Any]]:
    """The class of the rollout engine. ValueError if there is none, or if it samples from another
    kind of model.
    """
    engine: type[RolloutEngine[Any]] = load_class(
        ROLLOUT_PACKAGE, config.rollout.name, RolloutEngine
    )
    if engine.kind != config.model.kind:
        raise ValueError(
            f"rollout.name={config.rollout.name} samples from models of model.kind={engine.kind}, "
            "not from "
            f"model.kind={config.model.kind}"
        )
    quantization, offered = config.rollout.quantization, engine.quantizations
    if quantization is not None and quantization not in offered:
        raise ValueError(
            f"rollout.quantization={quantization!r}: rollout.name={config.rollout.name} offers "
            f"{', '.join(offered) or 'none (see rollout.engine_kwargs)'}"
        )
    if quantization is not None and find_spec(offered[quantization]) is None:
        raise ValueError(
            f"rollout.quantization={quantization} needs {offered[quantization]}: pip install "
            "'flowgrpo-rc[quantization]'"
        )
    if config.rollout.compile and not engine.compiles:
        raise ValueError(
            f"rollout.compile=true has no effect with rollout.name={config.rollout.name}: drop it"
        )
    if config.actor.replay == "aligned" and not engine.aligns:
        raise ValueError(
            f"actor.replay=aligned: rollout.name={config.rollout.name} forms batches of its own; "
            "set rollout.name="
            "diffusers, or drop it"
        )
    return engine


def engine_options(config: Config) -> dict[str, Any]:
    """What the engine is built with, besides the model and its network."""
    rollout = config.rollout
    options: dict[str, Any] = {
        "dtype": rollout.dtype,
        "chunk_size": chunk_size(config),
    }
    options |= {
        name: vars(rollout)[name] for name in ("quantization", "compile") if vars(rollout)[name]
    }
    return options | rollout.engine_kwargs


def check_model(config: Config) -> None:
    """Raise ValueError where settings or rewards do not fit the kind of flow model at model.path;
    loads no weights.
    """
    if config.model.kind != "diffusion":
        return
    adapter, rollout = adapter_of(config.model), config.rollout
    rollout.check_model(adapter)
    check_kind(config.reward, adapter.makes, "latent")
    guided = any(adapter.cfg_scale(spec) > 1 for spec in (rollout.spec(), rollout.held_out_spec()))
    if config.data.negative_prompt and not guided:
        raise ValueError(
            f"data.negative_prompt={config.data.negative_prompt!r} has no effect without "
            "guidance: set "
            f"rollout.pipeline.{adapter.cfg_key} above 1, or drop it"
        )


def check_machine(config: Config, device: torch.device) -> None:
    """ValueError for settings that `device` cannot follow; nothing has been loaded yet."""
    if config.model.offload_idle and device.type == "cpu":
        raise ValueError(
            "model.offload_idle=true has no effect on the CPU, where everything stays anyway: "
            "drop it"
        )
    check_device(config.rollout.dtype, config.rollout.quantization, device)
    if config.data.replay_dir is None:
        _check_engine(config, device)
    has_compiler = device.type != "cpu" or any(map(shutil.which, COMPILERS))
    for key, compiles in (
        ("rollout.compile=true", config.rollout.compile),
        ("actor.optim.name=adamw_8bit", config.actor.optim.name == "adamw_8bit"),
    ):
        if compiles and not has_compiler:
            raise ValueError(
                f"{key} on the CPU needs a C++ compiler, {' or '.join(COMPILERS)}: install one, "
                "or drop it"
            )


def _check_engine(config: Config, device: torch.device) -> None:
    engine, options = engine_of(config), engine_options(config)
    check_options(engine, options | {"model": None, "network": None}, ENGINE_KWARGS)
    if config.model.kind == "diffusion":
        pipeline_class, absent = (
            adapter_of(config.model).pipeline_class,
            absent_components(config.model),
        )
        try:
            engine.check(pipeline_class, absent, device, options)
        except ValueError as error:
            raise ValueError(f"{ENGINE_KWARGS}: {error}") from error
