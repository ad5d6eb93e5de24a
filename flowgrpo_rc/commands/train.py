"""`flowgrpo-rc train`: check, start a run or go on with one, train, leave the results."""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

from flowgrpo_rc.assembly.processes import make_console, make_log, make_processes
from flowgrpo_rc.assembly.run import assemble
from flowgrpo_rc.commands import EXIT_OK
from flowgrpo_rc.commands.opening import (
    check_one_folder,
    check_same_rewards,
    note_fetched,
    prepare_folder,
)
from flowgrpo_rc.commands.results import export_step, leave_results, uploads_of
from flowgrpo_rc.config.tree import Config
from flowgrpo_rc.distributed.memory import out_of_memory_in
from flowgrpo_rc.distributed.numerics import set_numerics
from flowgrpo_rc.distributed.processes import Processes
from flowgrpo_rc.distributed.stopping import EXIT_STOPPED, StopRequest
from flowgrpo_rc.models.lora_files import EXPORT_NAMES
from flowgrpo_rc.models.quantization import precision
from flowgrpo_rc.records.best import BestEvaluation
from flowgrpo_rc.records.checkpoint import Checkpoint, list_checkpoints
from flowgrpo_rc.records.console import Console
from flowgrpo_rc.records.metrics_file import MetricsFile
from flowgrpo_rc.records.run_folder import RunFolder
from flowgrpo_rc.records.run_log import Observer
from flowgrpo_rc.rollout.devices import AUTO
from flowgrpo_rc.spec.check_folder import can_be_extended, how_from_lora
from flowgrpo_rc.spec.checks import RunInputs, check_run
from flowgrpo_rc.spec.cores import stay_on_own_core
from flowgrpo_rc.spec.run_spec import RunSpec
from flowgrpo_rc.spec.tell import lines_of, ratio, tell
from flowgrpo_rc.training.trainer import Trainer

# Called with a step and its metrics, by name; step 0 is the first evaluation. True ends the run
# after this step, with its state saved.
Callback = Callable[[int, Mapping[str, float]], bool | None]


def main(arguments: argparse.Namespace) -> int:
    """Trains as `arguments.composition` says; with `--dry-run` only checks it."""
    spec: RunSpec = arguments.spec
    if arguments.dry_run:
        inputs = check_run(spec)
        config = spec.config
        sampler, held_out, _ = inputs.prompts
        print(
            f"ok: {len(sampler.prompts)} training prompts, {len(held_out)} held-out "
            "prompts, nothing was loaded"
        )
        prompts = f"{config.data.train_batch_size} prompts (data.train_batch_size)"
        samples = f"{config.rollout.n} samples (rollout.n)"
        steps = config.trainer.total_training_steps
        print(f"  Each step      {prompts}, each with {samples}; {steps} steps")
        print(lines_of(tell(spec, inputs.first_prompt)))
        return EXIT_OK
    return EXIT_OK if run(spec, at_once=True) is None else EXIT_STOPPED


def run(
    spec: RunSpec,
    *,
    callbacks: Sequence[Callback] = (),
    quiet: bool = False,
    at_once: bool = False,
) -> str | None:
    """Checks the settings and trains as they say, in this process or as one that was launched.

    A signal or `trainer.max_time` ends the run after the present step; `at_once` is that of
    `StopRequest`. Returns why the run stopped early, or None if it is complete.
    """
    with StopRequest(spec.given.trainer.max_time, at_once=at_once) as stop:
        # Before a check may call a reward, whose products would come too early.
        numerics = spec.given.trainer
        set_numerics(deterministic=numerics.deterministic, tf32=numerics.tf32)
        stay_on_own_core(spec)
        inputs = check_run(spec)
        processes = make_processes(spec.config, quiet=quiet)
        console = make_console(spec.config, processes, quiet=quiet)
        with processes.noticing_losses():
            check_one_folder(processes, inputs.resumed)
            if inputs.resumed is None:
                spec = _agreed(spec, processes, console)
            check_same_rewards(spec, processes)
            if facts := ratio(spec):
                console.message(
                    "; ".join(f"{name.lower()}: {fact}" for name, fact in facts.items())
                )
            if inputs.first_prompt:
                console.message(f"first prompt: {inputs.first_prompt}")
            observers = [partial(_tell, callback, stop) for callback in callbacks]
            reason = _run(spec, processes, inputs, stop, console, observers)
        processes.close()
    return reason


def _tell(callback: Callback, stop: StopRequest, step: int, metrics: Mapping[str, float]) -> None:
    if callback(step, metrics):
        stop.ask("a callback asked for it")


def _agreed(spec: RunSpec, processes: Processes, console: Console) -> RunSpec:
    """Returns the spec with the precision of the first process, which it tells."""
    if spec.given.rollout.dtype != AUTO:
        return spec
    in_bf16 = processes.any(processes.is_main and spec.settings.rollout.dtype == "bf16")
    rollout = replace(spec.settings.rollout, dtype="bf16" if in_bf16 else "fp32")
    console.message(f"note: rollout.dtype=auto: this run samples in {rollout.dtype}")
    return replace(spec, settings=replace(spec.settings, rollout=rollout))


def _run(
    spec: RunSpec,
    processes: Processes,
    inputs: RunInputs,
    stop: StopRequest,
    console: Console,
    observers: Sequence[Observer],
) -> str | None:
    config = spec.config
    folder = RunFolder(Path(config.trainer.output_dir))
    resumed = inputs.resumed
    if resumed is not None and _is_over(config, folder, resumed.step):
        if processes.is_main:
            _say_finished(config, folder, resumed, console)
        processes.wait()
        return None
    with folder.locked() if processes.is_main else nullcontext():
        if processes.is_main:
            for warning in prepare_folder(spec, folder, processes, inputs):
                console.warning(warning)
        processes.wait()
        first_step = 0 if resumed is None else resumed.step + 1
        log = make_log(
            config, folder, processes, first_step=first_step, console=console, observers=observers
        )
        with out_of_memory_in("loading"):
            trainer = assemble(
                spec, folder, processes, inputs.prompts, first_step=first_step, log=log
            )
        note_fetched(spec, folder, processes, inputs)
        return _train(spec, trainer, folder, resumed, stop)


def _is_over(config: Config, folder: RunFolder, step: int) -> bool:
    """Returns whether a run whose newest checkpoint is of this step has no step left."""
    rows = [row for row in MetricsFile(folder.metrics).rows() if row["step"] <= step]
    impatient = BestEvaluation(rows).over(config.trainer.patience)
    return impatient or step >= config.trainer.total_training_steps


def _train(
    spec: RunSpec,
    trainer: Trainer,
    folder: RunFolder,
    resumed: Checkpoint | None,
    stop: StopRequest,
) -> str | None:
    config = spec.config
    console = trainer.journal.log.console
    for note in notes(spec):
        console.message(f"note: {note}")
    rollout = config.rollout
    network = trainer.task.model.network
    for option in rollout.options():
        option_note = option.note(rollout.spec(), rollout.evaluations(), network)
        if option_note is not None:
            console.message(f"note: {option_note}")
    try:
        uploads = uploads_of(config) if trainer.processes.is_main else None
        trainer.export = partial(export_step, config, folder, uploads)
        with console:
            trainer.start(resumed)
            reason = trainer.fit(stop)
        if trainer.processes.is_main:
            leave_results(config, folder, uploads)
            _say_results(config, folder, console, reason)
        if uploads is not None:
            console.message(f"waits for the upload to {uploads.repo}")
            uploads.finish()
        trainer.processes.wait()
    except ValueError as error:  # from here on it is no longer the user's input that is wrong
        raise RuntimeError(f"training failed: {error}") from error
    finally:
        trainer.close()
    return reason


def notes(spec: RunSpec) -> Iterator[str]:
    """Yields what a user should know about the settings before the first step."""
    config = spec.config
    correction = config.algorithm.rollout_correction
    if correction.weights_are_metrics and (correction.rollout_is or correction.custom_correction):
        yield (
            "importance weights only add metrics in bypass mode with ppo_clip, whose ratio is the "
            "weight"
        )
    if config.actor.use_kl_loss and config.model.lora_path is not None:
        pulls = {
            "base": "base model, away from that LoRA (actor.kl_reference=start: to it)",
            "start": "LoRA as it was",
        }
        yield (
            f"the run starts from the LoRA of model.lora_path={config.model.lora_path}, and its KL "
            f"penalty pulls to the {pulls[config.actor.kl_reference]}"
        )
    plain = not correction.centered or spec.clip_ratio is not None
    if config.rollout.cache.window and spec.mode == "bypass" and plain:
        yield (
            "rollout.cache.window=true adds a mismatch, in which plain log-ratios with a narrow "
            "clip unlearned the bundled task: set centered=true and clip_ratio=auto:16"
        )
    why = spec.why_recompute
    if why is not None:
        yield f"old log-probs are recomputed, one forward for each trained step: {why}"
    if spec.fresh and spec.mode is not None and spec.expected_mismatch is None:
        formats = [config.rollout.spec().dtype]
        quantization = config.rollout.engine_kwargs.get("quantization")
        if quantization:
            formats.append(quantization)
        if config.rollout.cache.window:
            formats.append("cached blocks")
        yield (
            "no fault of the engine is reported by the size of the mismatch: what rounding makes "
            f"of it cannot be measured for a rollout in {'+'.join(formats)} and a training graph "
            f"in {precision(config.model.dtype, config.model.quantization)}"
        )


def _say_finished(config: Config, folder: RunFolder, newest: Checkpoint, console: Console) -> None:
    console.message(f"{folder.root}: this run is finished (step {newest.step}); nothing to do")
    if newest.step < config.trainer.total_training_steps:
        console.message("its held-out reward got no better; to go on, raise trainer.patience")
    elif can_be_extended(config):
        console.message("to make it longer, raise trainer.total_training_steps")
    else:
        console.message(how_from_lora(config, config.trainer.total_training_steps))
    # LoRA and report have to be there, and no older than the checkpoint.
    written = (list_checkpoints(folder.checkpoints)[-1] / "manifest.json").stat().st_mtime
    results = (folder.lora / EXPORT_NAMES[config.model.kind], folder.root / "report.html")
    if not all(path.is_file() and path.stat().st_mtime >= written for path in results):
        leave_results(config, folder)


def _say_results(config: Config, folder: RunFolder, console: Console, reason: str | None) -> None:
    rows = MetricsFile(folder.metrics).rows()
    best = BestEvaluation(rows)
    evaluated = [
        {name: row[name] for name in sorted(row) if name.startswith("val/")}
        for row in rows
        if "val/reward" in row
    ]
    if reason is not None:
        console.message(
            f"stopped early ({reason}); the state is saved, the same command goes on from here"
        )
    elif len(evaluated) > 1:
        console.final_table(evaluated[0], evaluated[-1])
    if best.over(config.trainer.patience):
        console.message(
            f"ended: no better held-out reward in {best.worse} evaluations (trainer.patience)"
        )
    console.message(f"LoRA: {folder.lora / EXPORT_NAMES[config.model.kind]}")
    if folder.lora_best.is_dir() and best.worse:
        reached = f"held-out reward {best.reward:.4f}, step {best.step}"
        console.message(f"best LoRA ({reached}): {folder.lora_best}")
    console.message(f"report: {folder.root / 'report.html'}")
