"""From a checked configuration to a run: resume or start, train, leave the results."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.build import assemble, check_model, engine_of, make_processes
from flowgrpo_rc.config.tree import Config, stored_config
from flowgrpo_rc.data.prompts import PromptSampler
from flowgrpo_rc.distributed.processes import Processes
from flowgrpo_rc.export.lora import export_lora
from flowgrpo_rc.export.model_card import write_model_card
from flowgrpo_rc.models.lora_files import EXPORT_NAMES
from flowgrpo_rc.records.checkpoint import Checkpoint, list_checkpoints, load_checkpoint
from flowgrpo_rc.records.metrics_file import MetricsFile
from flowgrpo_rc.records.rejected import drop_rejected_after
from flowgrpo_rc.records.run_folder import RunFolder
from flowgrpo_rc.report.run import write_report
from flowgrpo_rc.training.stopping import StopRequest
from flowgrpo_rc.training.trainer import Components, Trainer


def run(config: Config) -> str | None:
    """Train as `config` says. Returns why the run stopped early, or None if it is complete.

    `config.validate` has passed. Raises ValueError for what only files can tell, before a step is
    trained.
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
        return _train(config, parts, resumed, stop)


def checkpoint_to_resume(config: Config, folder: RunFolder) -> Checkpoint | None:
    """The newest checkpoint of the output folder, verified; None for a new run.

    Raises ValueError if the folder holds a run with other settings, CheckpointError for a damaged
    checkpoint.
    """
    checkpoints = list_checkpoints(folder.checkpoints)
    if config.trainer.resume_mode == "disable":
        if checkpoints or MetricsFile(folder.metrics).rows():
            raise ValueError(
                f"{folder.root} holds a run already: set trainer.resume_mode=auto to go on with "
                "it, or choose another "
                "trainer.output_dir"
            )
        return None
    if not checkpoints:
        return None
    folder.check_same_run(
        dataclasses.asdict(stored_config(folder.config)), dataclasses.asdict(config)
    )
    return load_checkpoint(checkpoints[-1])


def leave_results(config: Config, folder: RunFolder) -> None:
    """Export the LoRA of the newest checkpoint (its average, if it has one) with its card, and
    write the report.
    """
    newest = load_checkpoint(list_checkpoints(folder.checkpoints)[-1])
    export_lora(newest.tensors.get("ema", newest.tensors["lora"]), config.model, folder.lora)
    write_model_card(folder.lora, folder.root, config, step=newest.step)
    write_report(folder.root)


def _train(
    config: Config, parts: Components, resumed: Checkpoint | None, stop: StopRequest
) -> str | None:
    correction = config.algorithm.rollout_correction
    if correction.weights_are_metrics and (correction.rollout_is or correction.custom_correction):
        parts.console.message(
            "note: importance weights only add metrics in bypass mode with ppo_clip, whose ratio "
            "is the weight"
        )
    if not correction.bypass_mode and (why := config.why_recompute()) is not None:
        parts.console.message(
            f"note: old log-probs are recomputed, one forward for each trained step: {why}"
        )
    if config.fresh() and config.expected_mismatch() is None:
        rollout, trained = config.rollout, config.model.dtype
        formats = [rollout.spec().dtype, *filter(None, [rollout.engine_kwargs.get("quantization")])]
        parts.console.message(
            "note: no fault of the engine is reported by the size of the mismatch: what rounding "
            "makes of it cannot be "
            f"measured for a rollout in {'+'.join(formats)} and a training graph in {trained}"
        )
    try:
        with parts.console:
            reason = Trainer(parts, resumed).fit(stop)
        if parts.processes.is_main:
            leave_results(config, parts.folder)
            _say_results(config, parts, reason)
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
        raise ValueError(
            "trainer.output_dir must be a folder that all processes share: they see different "
            "checkpoints"
        )


def _prepare_folder(
    config: Config, folder: RunFolder, processes: Processes, resumed: Checkpoint | None
) -> None:
    settings: dict[str, Any] = dataclasses.asdict(config)
    folder.create(settings, processes.device, processes.count)
    step = -1 if resumed is None else resumed.step
    MetricsFile(folder.metrics).truncate_after(step)
    MetricsFile(folder.histograms).truncate_after(step)
    MetricsFile(folder.health).truncate_after(step)
    folder.drop_rollouts_after(step)
    drop_rejected_after(folder.rejected, step)


def _say_finished(config: Config, folder: RunFolder, newest: Checkpoint) -> None:
    print(f"{folder.root}: this run is finished (step {newest.step}); nothing to do")
    if (
        not (folder.lora / EXPORT_NAMES[config.model.kind]).is_file()
        or not (folder.root / "report.html").is_file()
    ):
        leave_results(config, folder)


def _say_results(config: Config, parts: Components, reason: str | None) -> None:
    console, folder = parts.console, parts.folder
    rows = MetricsFile(folder.metrics).rows()
    evaluated = [
        {name: row[name] for name in sorted(row) if name.startswith("val/")}
        for row in rows
        if "val/reward" in row
    ]
    if reason is None and len(evaluated) > 1:
        console.final_table(evaluated[0], evaluated[-1])
    if reason is not None:
        console.message(
            f"stopped early ({reason}); the state is saved, the same command goes on from here"
        )
    console.message(f"LoRA: {folder.lora / EXPORT_NAMES[config.model.kind]}")
    console.message(f"report: {folder.root / 'report.html'}")
