"""From a checked configuration to a calibration: sample a little, replay it, explain it, choose settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flowgrpo_rc.calibration.causes import Diagnosis, diagnose
from flowgrpo_rc.calibration.faults import Lora, Replay
from flowgrpo_rc.calibration.measure import (
    FEW,
    Copy,
    Mismatch,
    Rollout,
    against_engine,
    ask,
    guidances,
    plant_movements,
    sample,
)
from flowgrpo_rc.calibration.result import Calibration, Folder, show
from flowgrpo_rc.calibration.settings import MODES, REFERENCE_CLIP, choose
from flowgrpo_rc.config import Config
from flowgrpo_rc.models.base import FlowModel
from flowgrpo_rc.policies.flow import FlowPolicy
from flowgrpo_rc.rollout.base import RolloutEngine
from flowgrpo_rc.run import check_machine, check_model, chunk_size, engine_of, make_engine, make_processes, make_task
from flowgrpo_rc.training.image_task import ImageTask

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
    check_machine(config, processes.device)
    task = make_task(config, processes)
    assert isinstance(task, ImageTask)
    model, policy, spec = task.model, task.policy, config.rollout.spec()
    engine: RolloutEngine[Any] = make_engine(config, task)
    try:
        lora = Lora(*plant_movements(model.network, config.trainer.seed))
        for version, state in ((1, lora.before), (2, lora.current)):
            engine.sync_weights(state, version)
        many = sample(engine, ask(config, prompts, config.rollout.n, spec))
        few = [sample(engine, ask(config, prompts[: FEW[0]], FEW[1], each)) for each in guidances(model, spec)]
    finally:
        engine.close()
    scale = config.model.lora_alpha / config.model.lora_rank
    mismatches, diagnosis = _compare(config, policy, model, many, few, lora, scale)
    settings = choose(config, mismatches[0], mode=mode, cause=diagnosis.cause)
    configured = (config.actor.diffusion_loss.clip_ratio, settings.clip_ratio or config.actor.diffusion_loss.clip_ratio)
    clips = {REFERENCE_CLIP[spec.log_prob_convention], *configured}
    return Calibration(
        subject={
            "model": config.model.path,
            "trainer": _trainer_precision(config),
            "engine": config.rollout.name,
            "precision": spec.dtype,
            "guidance": model.cfg_scale(spec),
            "window": list(config.rollout.window()),
            "sde_type": spec.sde_type,
            "log_prob_convention": spec.log_prob_convention,
            "samples": len(many.batch),
        },
        mismatches=mismatches,
        clipped={clip: mismatches[0].clipped(clip) for clip in sorted(clips)},
        diagnosis=diagnosis,
        settings=settings,
    )


def _compare(
    config: Config, policy: FlowPolicy, model: FlowModel, many: Rollout, few: list[Rollout], lora: Lora, scale: float
) -> tuple[list[Mismatch], Diagnosis]:
    """The engine's mismatch at both guidances, then that of copies in the engine's precision and in others."""
    rows, dtype, quantization = chunk_size(config), config.rollout.dtype, config.rollout.quantization

    def trainer(rollout: Rollout) -> Any:
        return policy.log_probs(rollout.batch, config.actor.ppo_micro_batch_size_per_gpu)

    scales = [model.cfg_scale(rollout.request.spec) for rollout in few]
    ours = [trainer(rollout) for rollout in few]
    engines = [against_engine(*each) for each in zip(few, ours, scales, strict=True)]
    own = Copy(model, dtype, quantization, rows)
    replay = Replay(own, few[0], lora, scale)
    copies = [[own.against(*each) for each in zip(few, ours, scales, strict=True)]]
    others = [name for name in PRECISIONS if name not in (own.precision, _trainer_precision(config))]
    for name in others:
        copy = Copy(model, name, None, rows)
        copies.append([copy.against(*each) for each in zip(few, ours, scales, strict=True)])
    diagnosis = diagnose(few[0], replay, engines[0], [copy[0] for copy in copies], version=2)
    whole = against_engine(many, trainer(many), scales[0])
    shown = [copy for copy in copies if copy[0].precision != _trainer_precision(config)]
    return [whole, engines[1], *(each for copy in shown for each in copy)], diagnosis


def _trainer_precision(config: Config) -> str:
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
