"""From a checked configuration to a run: resume or start, assemble the parts, train, leave the results."""

from __future__ import annotations

import dataclasses
import logging
import shutil
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, InitProcessGroupKwargs

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.config import Config, stored_config
from flowgrpo_rc.correction.auto import AutoBands
from flowgrpo_rc.data.prompts import PromptSampler
from flowgrpo_rc.models.base import adapter_of, load_model
from flowgrpo_rc.models.causal_lm import load_causal_lm
from flowgrpo_rc.plugins import build, load_class
from flowgrpo_rc.policies.flow import FlowPolicy
from flowgrpo_rc.policies.token import TokenPolicy
from flowgrpo_rc.rewards.manager import RewardManager, check_kind, needs_samples
from flowgrpo_rc.rollout.base import RolloutEngine
from flowgrpo_rc.rollout.quantization import check_device
from flowgrpo_rc.training.ahead import AheadSource
from flowgrpo_rc.training.checkpoint import Checkpoint, list_checkpoints, load_checkpoint
from flowgrpo_rc.training.console import Console
from flowgrpo_rc.training.evaluation import Evaluator
from flowgrpo_rc.training.health import HealthMonitor
from flowgrpo_rc.training.image_task import ImageTask
from flowgrpo_rc.training.lora import add_lora, lora_parameters
from flowgrpo_rc.training.lora_files import EXPORT_NAMES, export_lora
from flowgrpo_rc.training.processes import Processes
from flowgrpo_rc.training.report import write_report
from flowgrpo_rc.training.run_folder import RunFolder
from flowgrpo_rc.training.sharding import resolve_strategy, shard_frozen_weights
from flowgrpo_rc.training.source import EngineSource, ReplaySource, RolloutSource
from flowgrpo_rc.training.stopping import StopRequest
from flowgrpo_rc.training.task import Task
from flowgrpo_rc.training.text_task import TextTask
from flowgrpo_rc.training.tracking import MetricsFile, Trackers, accelerate_loggers
from flowgrpo_rc.training.trainer import Components, Trainer
from flowgrpo_rc.training.update import PolicyUpdate

ROLLOUT_PACKAGE = "flowgrpo_rc.rollout"
COMPILERS = ("g++", "clang++")


def run(config: Config) -> str | None:
    """Train as `config` says. Returns why the run stopped early, or None if it is complete.

    `config.validate` has passed. Raises ValueError for what only files can tell, before a step is trained.
    """
    with StopRequest(config.trainer.max_time) as stop:
        prompts = config.read_prompts()
        engine_of(config)
        check_model(config)
        folder = RunFolder(Path(config.trainer.output_dir))
        resumed = checkpoint_to_resume(config, folder)
        processes = make_processes(config)
        with processes.noticing_losses():
            reason = _run(config, folder, processes, prompts, resumed, stop)
        processes.close()
        return reason


def _run(
    config: Config,
    folder: RunFolder,
    processes: Processes,
    prompts: tuple[PromptSampler, list[Prompt]],
    resumed: Checkpoint | None,
    stop: StopRequest,
) -> str | None:
    _check_one_folder(processes, resumed)
    config.check_replay(processes.rank, processes.count)
    if resumed is not None and resumed.step >= config.trainer.total_training_steps:
        if processes.is_main:
            _say_finished(config, folder, resumed)
        processes.wait()
        return None
    with folder.locked() if processes.is_main else nullcontext():
        if processes.is_main:
            _prepare_folder(config, folder, processes, resumed)
        processes.wait()
        first_step = 0 if resumed is None else resumed.step + 1
        parts = assemble(config, folder, processes, prompts, first_step=first_step)
        return _train(parts, resumed, stop)


def assemble(
    config: Config,
    folder: RunFolder,
    processes: Processes,
    prompts: tuple[PromptSampler, list[Prompt]],
    *,
    first_step: int,
) -> Components:
    """Load the model and build every part of a run; shard it once the engine has made its copy, if it is to be."""
    sampler, held_out = prompts
    check_machine(config, processes.device)
    task = make_task(config, processes)
    network = task.model.network
    task.check_prompts([*sampler.prompts, *held_out])
    config.check_output(num_parameters=sum(p.numel() for p in lora_parameters(network).values()))
    rewards = RewardManager(config.reward)
    source = make_source(config, task, sampler, rewards, processes, first_step=first_step)
    if processes.count > 1 and resolve_strategy(config.trainer.strategy) == "fsdp2":
        shard_frozen_weights(network, processes.device, timedelta(seconds=config.trainer.timeout_s))
    correction, auto_bands = config.algorithm.rollout_correction, make_auto_bands(config, processes)
    return Components(
        config=config,
        processes=processes,
        folder=folder,
        task=task,
        source=source,
        rewards=rewards,
        update=PolicyUpdate(
            task.policy,
            config.actor,
            partial(task.loss_terms, config.loss()),
            processes,
            total_updates=config.total_updates(),
            report_mismatch=correction.bypass_mode,
            whole_windows=correction.bypass_level == "window",
            auto_bands=auto_bands if correction.bypass_mode else None,
        ),
        evaluator=Evaluator(task, held_out, config.rollout.val_kwargs, rewards),
        health=HealthMonitor(config.effective_correction()),
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
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=config.trainer.timeout_s))],
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
        tokens = TokenPolicy(language, network, autocast=processes.autocast, checkpoint_gradients=checkpointing)
        return TextTask(language, tokens, config.rollout)
    model = load_model(config.model, processes.device)
    for spec, key in ((config.rollout.spec(), "pipeline"), (config.rollout.held_out_spec(), "val_kwargs")):
        model.check(spec, f"rollout.{key}")
    network = add_lora(model, config.model, seed)
    if checkpointing:
        model.transformer.enable_gradient_checkpointing()
    policy = FlowPolicy(model, network, autocast=processes.autocast)
    decode = needs_samples(config.reward)
    return ImageTask(model, policy, config.rollout, seed, keep_means=config.keep_means(), decode=decode)


def make_auto_bands(config: Config, processes: Processes) -> AutoBands | None:
    """What follows the mismatch where a criterion has an `auto` band."""
    correction, num_steps = config.algorithm.rollout_correction, config.rollout.pipeline.num_inference_steps
    bands = () if correction.custom_correction else correction.rules().auto
    return AutoBands(bands, num_steps, processes.device) if bands else None


def make_source(
    config: Config,
    task: Task,
    sampler: PromptSampler,
    rewards: RewardManager,
    processes: Processes,
    *,
    first_step: int,
) -> RolloutSource:
    """The engine that `rollout.name` names, in a thread if it samples ahead, or the files of `data.replay_dir`."""
    if config.data.replay_dir is not None:
        folder = Path(config.data.replay_dir).expanduser()
        samples = config.samples_per_step(processes.count)
        terms = rewards.weights if config.algorithm.adv_estimator == "gdpo" else ()
        return ReplaySource(folder, task, processes, config.rollout, samples=samples, terms=terms)
    rollout = config.rollout
    options: dict[str, Any] = {
        "model": task.model,
        "network": task.model.network,
        "dtype": rollout.dtype,
        "chunk_size": rollout.micro_batch_size_per_gpu or config.actor.ppo_micro_batch_size_per_gpu,
    }
    options |= {name: vars(rollout)[name] for name in ("quantization", "compile") if vars(rollout)[name]}
    engine: RolloutEngine[Any] = build(engine_of(config), options | rollout.engine_kwargs, "rollout.engine_kwargs")
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
    return AheadSource(
        source, rollout.staleness, steps=range(max(1, first_step), config.trainer.total_training_steps + 1)
    )


def engine_of(config: Config) -> type[RolloutEngine[Any]]:
    """The class of the rollout engine. ValueError if there is none, or if it samples from another kind of model."""
    engine: type[RolloutEngine[Any]] = load_class(ROLLOUT_PACKAGE, config.rollout.name, RolloutEngine)
    if engine.kind != config.model.kind:
        raise ValueError(
            f"rollout.name={config.rollout.name} samples from models of model.kind={engine.kind}, not from "
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
        raise ValueError(f"rollout.compile=true has no effect with rollout.name={config.rollout.name}: drop it")
    return engine


def check_model(config: Config) -> None:
    """Raise ValueError where settings or rewards do not fit the kind of flow model at model.path; loads no weights."""
    if config.model.kind != "diffusion":
        return
    adapter, rollout = adapter_of(config.model), config.rollout
    rollout.check_model(adapter)
    check_kind(config.reward, adapter.makes, "latent")
    guided = any(adapter.cfg_scale(spec) > 1 for spec in (rollout.spec(), rollout.held_out_spec()))
    if config.data.negative_prompt and not guided:
        raise ValueError(
            f"data.negative_prompt={config.data.negative_prompt!r} has no effect without guidance: set "
            f"rollout.pipeline.{adapter.cfg_key} above 1, or drop it"
        )


def check_machine(config: Config, device: torch.device) -> None:
    """ValueError for settings that `device` cannot follow; nothing has been loaded yet."""
    if config.model.offload_idle and device.type == "cpu":
        raise ValueError("model.offload_idle=true has no effect on the CPU, where everything stays anyway: drop it")
    check_device(config.rollout.dtype, config.rollout.quantization, device)
    has_compiler = device.type != "cpu" or any(map(shutil.which, COMPILERS))
    for key, compiles in (
        ("rollout.compile=true", config.rollout.compile),
        ("actor.optim.name=adamw_8bit", config.actor.optim.name == "adamw_8bit"),
    ):
        if compiles and not has_compiler:
            raise ValueError(
                f"{key} on the CPU needs a C++ compiler, {' or '.join(COMPILERS)}: install one, or drop it"
            )


def checkpoint_to_resume(config: Config, folder: RunFolder) -> Checkpoint | None:
    """The newest checkpoint of the output folder, verified; None for a new run.

    Raises ValueError if the folder holds a run with other settings, CheckpointError for a damaged checkpoint.
    """
    checkpoints = list_checkpoints(folder.checkpoints)
    if config.trainer.resume_mode == "disable":
        if checkpoints or MetricsFile(folder.metrics).rows():
            raise ValueError(
                f"{folder.root} holds a run already: set trainer.resume_mode=auto to go on with it, or choose another "
                "trainer.output_dir"
            )
        return None
    if not checkpoints:
        return None
    folder.check_same_run(dataclasses.asdict(stored_config(folder.config)), dataclasses.asdict(config))
    return load_checkpoint(checkpoints[-1])


def leave_results(config: Config, folder: RunFolder) -> None:
    """Export the LoRA of the newest checkpoint (its average, if it has one) and write the report."""
    newest = load_checkpoint(list_checkpoints(folder.checkpoints)[-1])
    export_lora(newest.tensors.get("ema", newest.tensors["lora"]), config.model, folder.lora)
    write_report(folder.root)


def _train(parts: Components, resumed: Checkpoint | None, stop: StopRequest) -> str | None:
    correction = parts.config.algorithm.rollout_correction
    if correction.weights_are_metrics and (correction.rollout_is or correction.custom_correction):
        parts.console.message(
            "note: importance weights only add metrics in bypass mode with ppo_clip, whose ratio is the weight"
        )
    try:
        with parts.console:
            reason = Trainer(parts, resumed).fit(stop)
        if parts.processes.is_main:
            leave_results(parts.config, parts.folder)
            _say_results(parts, reason)
        parts.processes.wait()
    except ValueError as error:  # from here on it is no longer the user's input that is wrong
        raise RuntimeError(f"training failed: {error}") from error
    finally:
        parts.rewards.close()
        parts.source.close()
        parts.trackers.finish()
    return reason


def _check_one_folder(processes: Processes, resumed: Checkpoint | None) -> None:
    step = torch.tensor([0.0 if resumed is None else resumed.step], device=processes.device)
    if processes.max(step) != -processes.max(-step):
        raise ValueError("trainer.output_dir must be a folder that all processes share: they see different checkpoints")


def _prepare_folder(config: Config, folder: RunFolder, processes: Processes, resumed: Checkpoint | None) -> None:
    settings: dict[str, Any] = dataclasses.asdict(config)
    folder.create(settings, processes.device, processes.count)
    step = -1 if resumed is None else resumed.step
    MetricsFile(folder.metrics).truncate_after(step)
    MetricsFile(folder.health).truncate_after(step)
    folder.drop_rollouts_after(step)


def _say_finished(config: Config, folder: RunFolder, newest: Checkpoint) -> None:
    print(f"{folder.root}: this run is finished (step {newest.step}); nothing to do")
    if not (folder.lora / EXPORT_NAMES[config.model.kind]).is_file() or not (folder.root / "report.html").is_file():
        leave_results(config, folder)


def _say_results(parts: Components, reason: str | None) -> None:
    console, folder = parts.console, parts.folder
    rows = MetricsFile(folder.metrics).rows()
    evaluated = [
        {name: row[name] for name in sorted(row) if name.startswith("val/")} for row in rows if "val/reward" in row
    ]
    if reason is None and len(evaluated) > 1:
        console.final_table(evaluated[0], evaluated[-1])
    if reason is not None:
        console.message(f"stopped early ({reason}); the state is saved, the same command goes on from here")
    console.message(f"LoRA: {folder.lora / EXPORT_NAMES[parts.config.model.kind]}")
    console.message(f"report: {folder.root / 'report.html'}")
