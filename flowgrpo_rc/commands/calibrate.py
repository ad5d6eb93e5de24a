"""From a checked configuration to a calibration: sample a little, replay it, explain it, choose
settings.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.build import (
    check_machine,
    check_model,
    chunk_size,
    engine_of,
    make_engine,
    make_processes,
    make_task,
)
from flowgrpo_rc.calibration.causes import Diagnosis, check_record, diagnose
from flowgrpo_rc.calibration.choice import Bound, bound_of, check_modes, choose
from flowgrpo_rc.calibration.faults import Lora, Replay
from flowgrpo_rc.calibration.measure import (
    FEW,
    Copy,
    Mismatch,
    RecordedRollout,
    against_engine,
    ask,
    other_guidance,
    plant_movements,
    require_finite,
    sample,
)
from flowgrpo_rc.calibration.result import Calibration, Folder, show
from flowgrpo_rc.config.tree import Config
from flowgrpo_rc.data.prompts import PromptSampler
from flowgrpo_rc.losses.base import DIFFUSION_KEY
from flowgrpo_rc.models.base import DTYPES, FlowModel
from flowgrpo_rc.policies.base import Measured
from flowgrpo_rc.rollout.engine import RolloutEngine
from flowgrpo_rc.training.sources.engine import other_tensors
from flowgrpo_rc.training.tasks.image import ImageTask

PRECISIONS = ("fp32", "fp16", "bf16")  # of copies, whatever the engine has


def calibrate(
    config: Config,
    *,
    out: str,
    name: str,
    num_prompts: int,
    mode: str = "auto",
    overwrite: bool = False,
) -> Calibration:
    """Measure, print and write a calibration of a validated configuration; nothing is trained.

    Raises ValueError for text models, for replayed data, for a mode that cannot be, and where
    another result would be lost, before anything is loaded; for log-probs that are no numbers, once
    they are sampled.
    """
    folder = Folder(Path(out), name)
    folder.check(overwrite=overwrite)
    _check(config, num_prompts, mode)
    found = measure(config, num_prompts=num_prompts, mode=mode)
    folder.write(found)
    show(found, folder)
    return found


def measure(config: Config, *, num_prompts: int, mode: str) -> Calibration:
    """The calibration itself, in one process."""
    prompts = _prompts(config, num_prompts)
    config.trainer.logger = ["console"]
    processes = make_processes(config)
    if processes.count > 1:
        raise ValueError(
            f"calibrate runs in one process, not in {processes.count}: start it without a launcher"
        )
    check_machine(config, processes.device)
    task = make_task(config, processes)
    assert isinstance(task, ImageTask)
    engine = make_engine(config, task)
    lora = Lora(*plant_movements(task.model.network, config.trainer.seed))
    try:
        rollouts = sample_all(config, task.model, engine, lora, prompts)
    finally:
        engine.close()
    mismatches, bound, diagnosis = compare(config, task, rollouts, lora)
    settings = choose(config, bound, mode=mode, doubt=diagnosis.doubt)
    return Calibration(
        subject={
            "model": config.model.path,
            "trainer": trainer_precision(config),
            "engine": config.rollout.name,
            "precision": config.rollout.spec().dtype,
            "guidance": mismatches[0].guidance,
            "window": list(config.rollout.window()),
            "sde_type": config.rollout.algo.sde_type,
            "loss_mode": config.actor.diffusion_loss.loss_mode,
            "log_prob_convention": config.rollout.algo.log_prob_convention,
            "samples": len(rollouts.many.batch),
        },
        mismatches=mismatches,
        bound=bound,
        clipped={}
        if bound is None
        else _clipped(bound, settings.values[f"{DIFFUSION_KEY}.{bound.key}"]),
        diagnosis=diagnosis,
        settings=settings,
    )


def _clipped(bound: Bound, chosen: float) -> dict[float, float]:
    """What the reference's, the configured and the chosen bound clip before any update, in bypass
    mode.
    """
    return {
        value: bound.exceeded(value)
        for value in sorted({bound.reference, bound.configured, chosen})
    }


class Rollouts(NamedTuple):
    """Many samples and a few at the configured guidance, and a few at another. other_tensors: of
    the LoRA that the engine holds, how many are not those that it was given."""

    many: RecordedRollout
    few: RecordedRollout
    other: RecordedRollout
    other_tensors: int


def sample_all(
    config: Config,
    model: FlowModel,
    engine: RolloutEngine[Any],
    lora: Lora,
    prompts: Sequence[Prompt],
) -> Rollouts:
    """What the engine samples after it was given the LoRA of both movements, as versions 1 and
    2.
    """
    for version, state in ((1, lora.before), (2, lora.current)):
        engine.sync_weights(state, version)
    spec, held, few = config.rollout.spec(), engine.held_weights(), prompts[: FEW[0]]
    keep_means = config.actor.diffusion_loss.needs_means
    return Rollouts(
        many=sample(engine, ask(config, prompts, config.rollout.n, spec, keep_means=keep_means)),
        few=sample(engine, ask(config, few, FEW[1], spec)),
        other=sample(engine, ask(config, few, FEW[1], other_guidance(model, spec))),
        other_tensors=0 if held is None else other_tensors(held, lora.current),
    )


class Comparison(NamedTuple):
    """mismatches: that of the engine over many samples and at another guidance, then that of copies
    of the trainer's network in the engine's precision and in others; bound: of the loss; diagnosis:
    what explains the mismatch."""

    mismatches: list[Mismatch]
    bound: Bound | None
    diagnosis: Diagnosis


def compare(config: Config, task: ImageTask, rollouts: Rollouts, lora: Lora) -> Comparison:
    """The trainer, and copies of its network one after the other, on what the engine sampled."""
    model, few = task.model, (rollouts.few, rollouts.other)

    def trainer(rollout: RecordedRollout) -> Measured:
        measured = task.policy.measure(rollout.batch, config.actor.ppo_micro_batch_size_per_gpu)
        require_finite(
            rollout, measured.log_probs, "trainer", "model.dtype and trainer.mixed_precision"
        )
        return measured

    def copied(dtype: str, quantization: str | None) -> Copy:
        return Copy(model, dtype, quantization, chunk_size(config))

    def differ(copy: Copy) -> list[Mismatch]:
        return [copy.against(*each) for each in compared]

    many, guidance = (
        trainer(rollouts.many),
        [model.cfg_scale(rollout.request.spec) for rollout in few],
    )
    whole = against_engine(rollouts.many, many.log_probs, guidance[0])
    compared = list(
        zip(few, [trainer(rollout).log_probs for rollout in few], guidance, strict=True)
    )
    engine, engine_other = (against_engine(*each) for each in compared)
    others = [
        differ(copied(name, None)) for name in other_precisions(config)
    ]  # each is gone before the next is made
    own = copied(config.rollout.dtype, config.rollout.quantization)
    copies = [differ(own), *others]
    replay = Replay(own, rollouts.few, lora, config.model.lora_alpha / config.model.lora_rank)
    found = check_record(rollouts.few, model, version=2, other_tensors=rollouts.other_tensors)
    diagnosis = diagnose(rollouts.few, replay, engine, [copy[0] for copy in copies], found)
    shown = [each for copy in copies for each in copy if each.precision != same_as_trainer(config)]
    return Comparison(
        [whole, engine_other, *shown], bound_of(config, whole.differences, many), diagnosis
    )


def same_as_trainer(config: Config) -> str | None:
    """The precision in which a copy is the trainer's network once more; None under autocast, which
    no copy has.
    """
    return config.model.dtype if config.trainer.mixed_precision == "no" else None


def other_precisions(config: Config) -> list[str]:
    """Of copies beside that in the engine's precision: without the trainer's own, and no larger
    than its weights.
    """
    known, size = (
        (config.rollout.spec().dtype, same_as_trainer(config)),
        DTYPES[config.model.dtype].itemsize,
    )
    return [name for name in PRECISIONS if name not in known and DTYPES[name].itemsize <= size]


def trainer_precision(config: Config) -> str:
    """Of the training graph."""
    mixed = config.trainer.mixed_precision
    return config.model.dtype if mixed == "no" else mixed


def _prompts(config: Config, count: int) -> list[Prompt]:
    """The first that training would take."""
    prompts = config.read_prompts()[0].prompts
    if count > len(prompts):
        raise ValueError(f"--prompts {count}: data.train_files has {len(prompts)}")
    return PromptSampler(prompts, count, config.trainer.seed).step(0)


def _check(config: Config, num_prompts: int, mode: str) -> None:
    """ValueError for what cannot be calibrated; nothing is loaded."""
    if config.model.kind != "diffusion":
        raise ValueError(
            f"calibrate knows flow models, model.kind=diffusion; model.kind={config.model.kind}, "
            "whose mismatch the "
            "metrics of a first step show"
        )
    if config.data.replay_dir is not None:
        raise ValueError(
            f"data.replay_dir={config.data.replay_dir}: calibrate measures an engine; drop it"
        )
    if num_prompts < 1:
        raise ValueError(f"--prompts {num_prompts}: give at least 1")
    check_modes(config, mode)
    engine_of(config)
    check_model(config)
