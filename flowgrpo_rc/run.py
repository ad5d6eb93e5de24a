"""From a checked configuration to a run: resume or start, assemble the parts, train, leave the results."""

from __future__ import annotations

import dataclasses
import logging
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.config import Config, stored_config
from flowgrpo_rc.correction.auto import AutoBands
from flowgrpo_rc.data.prompts import PromptSampler
from flowgrpo_rc.models.base import load_model
from flowgrpo_rc.models.causal_lm import load_causal_lm
from flowgrpo_rc.plugins import build, load_class
from flowgrpo_rc.policies.flow import FlowPolicy
from flowgrpo_rc.policies.token import TokenPolicy
from flowgrpo_rc.rewards.manager import RewardManager
from flowgrpo_rc.rollout.base import RolloutEngine
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
from flowgrpo_rc.training.source import EngineSource, ReplaySource, RolloutSource
from flowgrpo_rc.training.stopping import StopRequest
from flowgrpo_rc.training.task import Task
from flowgrpo_rc.training.text_task import TextTask
from flowgrpo_rc.training.tracking import MetricsFile, Trackers, accelerate_loggers
from flowgrpo_rc.training.trainer import Components, Trainer
from flowgrpo_rc.training.update import PolicyUpdate

ROLLOUT_PACKAGE = "flowgrpo_rc.rollout"


def run(config: Config) -> str | None:
    """Train as `config` says. Returns why the run stopped early, or None if it is complete.

    `config.validate` has passed. Raises ValueError for what only files can tell, before a step is trained.
    """
    with StopRequest(config.trainer.max_time) as stop:
        prompts = config.read_prompts()
        engine_of(config)
        folder = RunFolder(Path(config.trainer.output_dir))
        resumed = checkpoint_to_resume(config, folder)
        processes = make_processes(config)
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
    """Load the model and build every part of a run."""
    sampler, held_out = prompts
    task = make_task(config, processes)
    network = task.model.network
    task.check_prompts([*sampler.prompts, *held_out])
    config.check_output(num_parameters=sum(p.numel() for p in lora_parameters(network).values()))
    rewards = RewardManager(config.reward)
    correction, auto_bands = config.algorithm.rollout_correction, make_auto_bands(config, processes)
    return Components(
        config=config,
        processes=processes,
        folder=folder,
        task=task,
        source=make_source(config, task, sampler, rewards, processes),
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
    accelerator = Accelerator(
        cpu=config.trainer.device == "cpu" or not torch.cuda.is_available(),
        mixed_precision=config.trainer.mixed_precision,
        log_with=accelerate_loggers(config.trainer.logger) or None,
        project_dir=config.trainer.output_dir,
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
    model.latent_shape(config.rollout.pipeline.height, config.rollout.pipeline.width)
    network = add_lora(model, config.model, seed)
    if checkpointing:
        model.transformer.enable_gradient_checkpointing()
    policy = FlowPolicy(model, network, autocast=processes.autocast)
    return ImageTask(model, policy, config.rollout, seed, keep_means=config.keep_means())


def make_auto_bands(config: Config, processes: Processes) -> AutoBands | None:
    """What follows the mismatch where a criterion has an `auto` band."""
    correction, num_steps = config.algorithm.rollout_correction, config.rollout.pipeline.num_inference_steps
    bands = () if correction.custom_correction else correction.rules().auto
    return AutoBands(bands, num_steps, processes.device) if bands else None


def make_source(
    config: Config, task: Task, sampler: PromptSampler, rewards: RewardManager, processes: Processes
) -> RolloutSource:
    """The engine that `rollout.name` names, or the files of `data.replay_dir`."""
    if config.data.replay_dir is not None:
        folder = Path(config.data.replay_dir).expanduser()
        samples = config.samples_per_step(processes.count)
        return ReplaySource(folder, task, processes, config.rollout, samples=samples)
    options = {
        "model": task.model,
        "network": task.model.network,
        "dtype": config.rollout.dtype,
        "chunk_size": config.rollout.micro_batch_size_per_gpu or config.actor.ppo_micro_batch_size_per_gpu,
    }
    engine: RolloutEngine[Any] = build(
        engine_of(config), options | config.rollout.engine_kwargs, "rollout.engine_kwargs"
    )
    return EngineSource(
        engine,
        task,
        sampler,
        rewards,
        processes,
        config.rollout,
        mini_batch_size=config.actor.ppo_mini_batch_size,
        seed=config.trainer.seed,
    )


def engine_of(config: Config) -> type[RolloutEngine[Any]]:
    """The class of the rollout engine. ValueError if there is none, or if it samples from another kind of model."""
    engine: type[RolloutEngine[Any]] = load_class(ROLLOUT_PACKAGE, config.rollout.name, RolloutEngine)
    if engine.kind != config.model.kind:
        raise ValueError(
            f"rollout.name={config.rollout.name} samples from models of model.kind={engine.kind}, not from "
            f"model.kind={config.model.kind}"
        )
    return engine


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
