"""From a checked configuration to a calibration: sample a little, replay it, explain it, choose settings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from flowgrpo_rc.assemble import (
    check_machine,
    check_model,
    chunk_size,
    engine_of,
    make_engine,
    make_processes,
    make_task,
)
from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.calibration.causes import Diagnosis, check_record, diagnose
from flowgrpo_rc.calibration.faults import Lora, Replay
from flowgrpo_rc.calibration.measure import (
    FEW,
    Copy,
    Mismatch,
    Rollout,
    against_engine,
    ask,
    other_guidance,
    plant_movements,
    sample,
)
from flowgrpo_rc.calibration.result import Calibration, Folder, show
from flowgrpo_rc.calibration.settings import MODES, REFERENCE_CLIP, choose
from flowgrpo_rc.config import Config
from flowgrpo_rc.models.base import FlowModel
from flowgrpo_rc.rollout.base import RolloutEngine
from flowgrpo_rc.training.image_task import ImageTask
from flowgrpo_rc.training.source import other_tensors

PRECISIONS = ("fp32", "fp16", "bf16")  # of copies, whatever the engine has


def calibrate(
    config: Config, *, out: str, name: str, num_prompts: int, mode: str = "auto", overwrite: bool = False
) -> Calibration:
    """Measure, print and write a calibration of a validated configuration; nothing is trained.

    Raises ValueError for text models, for replayed data, for an unknown mode, and where another result would be lost.
    """
    folder = Folder(Path(out), name)
    folder.check(overwrite=overwrite)
    _check(config, num_prompts, mode)
    found = measure(config, num_prompts=num_prompts, mode=mode)
    found.settings.applied(config).validate()
    folder.write(found)
    show(found, folder)
    return found


def measure(config: Config, *, num_prompts: int, mode: str) -> Calibration:
    """The calibration itself, in one process."""
    prompts = config.read_prompts()[0].step(0)[:num_prompts]
    config.trainer.logger = ["console"]
    processes = make_processes(config)
    if processes.count > 1:
        raise ValueError(f"calibrate runs in one process, not in {processes.count}: start it without a launcher")
    check_machine(config, processes.device)
    task = make_task(config, processes)
    assert isinstance(task, ImageTask)
    engine = make_engine(config, task)
    lora = Lora(*plant_movements(task.model.network, config.trainer.seed))
    try:
        rollouts = sample_all(config, task.model, engine, lora, prompts)
    finally:
        engine.close()
    mismatches, diagnosis = compare(config, task, rollouts, lora)
    settings = choose(config, mismatches[0], mode=mode, cause=diagnosis.cause)
    convention, configured = config.rollout.algo.log_prob_convention, config.actor.diffusion_loss.clip_ratio
    clips = {REFERENCE_CLIP[convention], configured, settings.clip_ratio or configured}
    return Calibration(
        subject={
            "model": config.model.path,
            "trainer": trainer_precision(config),
            "engine": config.rollout.name,
            "precision": config.rollout.spec().dtype,
            "guidance": mismatches[0].guidance,
            "window": list(config.rollout.window()),
            "sde_type": config.rollout.algo.sde_type,
            "log_prob_convention": convention,
            "samples": len(rollouts.many.batch),
        },
        mismatches=mismatches,
        clipped={clip: mismatches[0].clipped(clip) for clip in sorted(clips)},
        diagnosis=diagnosis,
        settings=settings,
    )


class Rollouts(NamedTuple):
    """Many samples and a few at the configured guidance, and a few at another. other_tensors: of the LoRA that the
    engine holds, how many are not those that it was given."""

    many: Rollout
    few: Rollout
    other: Rollout
    other_tensors: int


def sample_all(
    config: Config, model: FlowModel, engine: RolloutEngine[Any], lora: Lora, prompts: Sequence[Prompt]
) -> Rollouts:
    """What the engine samples after it was given the LoRA of both movements, as versions 1 and 2."""
    for version, state in ((1, lora.before), (2, lora.current)):
        engine.sync_weights(state, version)
    spec, held, few = config.rollout.spec(), engine.held_weights(), prompts[: FEW[0]]
    return Rollouts(
        many=sample(engine, ask(config, prompts, config.rollout.n, spec)),
        few=sample(engine, ask(config, few, FEW[1], spec)),
        other=sample(engine, ask(config, few, FEW[1], other_guidance(model, spec))),
        other_tensors=0 if held is None else other_tensors(held, lora.current),
    )


def compare(config: Config, task: ImageTask, rollouts: Rollouts, lora: Lora) -> tuple[list[Mismatch], Diagnosis]:
    """The mismatch of the engine, over many samples and at another guidance, then that of copies of the trainer's
    network in the engine's precision and in others; and what explains it."""
    model, few = task.model, (rollouts.few, rollouts.other)

    def trainer(rollout: Rollout) -> Tensor:
        return task.policy.log_probs(rollout.batch, config.actor.ppo_micro_batch_size_per_gpu)

    def copied(dtype: str, quantization: str | None) -> Copy:
        return Copy(model, dtype, quantization, chunk_size(config))

    scales = [model.cfg_scale(rollout.request.spec) for rollout in few]
    compared = list(zip(few, [trainer(rollout) for rollout in few], scales, strict=True))
    engine, engine_other = (against_engine(*each) for each in compared)
    own, ours = copied(config.rollout.dtype, config.rollout.quantization), trainer_precision(config)
    replay = Replay(own, rollouts.few, lora, config.model.lora_alpha / config.model.lora_rank)

    def differences(copy: Copy) -> list[Mismatch]:
        return [copy.against(*each) for each in compared]

    others = [name for name in PRECISIONS if name not in (own.precision, ours)]
    copies = [differences(own), *(differences(copied(name, None)) for name in others)]  # one in memory at a time
    found = check_record(rollouts.few, model, version=2, other_tensors=rollouts.other_tensors)
    diagnosis = diagnose(rollouts.few, replay, engine, [copy[0] for copy in copies], found)
    whole = against_engine(rollouts.many, trainer(rollouts.many), scales[0])
    shown = [each for copy in copies for each in copy if each.precision != ours]
    return [whole, engine_other, *shown], diagnosis


def trainer_precision(config: Config) -> str:
    """Of the training graph."""
    mixed = config.trainer.mixed_precision
    return config.model.dtype if mixed == "no" else mixed


def _check(config: Config, num_prompts: int, mode: str) -> None:
    """ValueError for what cannot be calibrated; nothing is loaded."""
    if config.model.kind != "diffusion":
        raise ValueError(
            f"calibrate knows flow models, model.kind=diffusion; model.kind={config.model.kind}, whose mismatch the "
            "metrics of a first step show"
        )
    if config.data.replay_dir is not None:
        raise ValueError(f"data.replay_dir={config.data.replay_dir}: calibrate measures an engine; drop it")
    if mode not in MODES:
        raise ValueError(f"--mode {mode}: allowed are {', '.join(MODES)}")
    if num_prompts < 1:
        raise ValueError(f"--prompts {num_prompts}: give at least 1")
    engine_of(config)
    check_model(config)
