"""`flowgrpo-rc calibrate`: sample a little, replay it, explain the mismatch, choose settings."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from flowgrpo_rc.assembly.processes import make_processes
from flowgrpo_rc.assembly.source import make_engine
from flowgrpo_rc.assembly.task import make_task
from flowgrpo_rc.batch import Prompt, PromptBatch
from flowgrpo_rc.calibration.causes import Symptom
from flowgrpo_rc.calibration.choice import Bound, bound_of, check_modes, choose
from flowgrpo_rc.calibration.faults import PLANTED, Lora, Replay
from flowgrpo_rc.calibration.measure import (
    FEW,
    Copy,
    Mismatch,
    RecordedRollout,
    ask,
    mismatch_of,
    other_guidance,
    other_precisions,
    plant_movements,
    require_finite,
    same_as_trainer,
    sample,
    unquantized,
)
from flowgrpo_rc.calibration.noise import check_noise
from flowgrpo_rc.calibration.record import check_engine, check_means, check_prompts, check_record
from flowgrpo_rc.calibration.result import Calibration, Folder, show
from flowgrpo_rc.calibration.savings import (
    caches_to_try,
    check_cache,
    check_tail,
    try_savings,
    with_cheapest,
)
from flowgrpo_rc.calibration.verdict import Diagnosis, diagnose
from flowgrpo_rc.commands import EXIT_OK
from flowgrpo_rc.data.prompts import PromptSampler
from flowgrpo_rc.losses.base import DIFFUSION_KEY
from flowgrpo_rc.models.base import FlowModel
from flowgrpo_rc.models.lora import lora_parameters
from flowgrpo_rc.plugins import refuse
from flowgrpo_rc.policies.base import Evaluation
from flowgrpo_rc.rollout.engine import RolloutEngine
from flowgrpo_rc.rollout.options.option import RolloutOption
from flowgrpo_rc.spec.checks import check_run
from flowgrpo_rc.spec.run_spec import RunSpec, engine_options
from flowgrpo_rc.training.tasks.image import ImageTask


def main(arguments: argparse.Namespace) -> int:
    """Calibrates the configuration that the command line asks for: measures, prints and writes."""
    spec: RunSpec = arguments.spec
    folder = Folder(Path(arguments.out), arguments.name)
    folder.check(overwrite=arguments.overwrite)
    prompts = _checked_prompts(spec, arguments.prompts, arguments.mode)
    if arguments.tail:
        check_tail(spec.config)
    if arguments.cache:
        check_cache(spec)
    tail, cache = arguments.tail, arguments.cache
    calibration = measure(spec, prompts, mode=arguments.mode, tail=tail, cache=cache)
    folder.write(calibration)
    show(calibration, folder)
    return EXIT_OK


def measure(
    spec: RunSpec, prompts: Sequence[Prompt], *, mode: str, tail: bool, cache: bool
) -> Calibration:
    """Measures a calibration of checked settings in one process."""
    config = spec.config
    config.trainer.logger = ["console"]
    processes = make_processes(config)
    if processes.count > 1:
        raise ValueError(
            f"calibrate runs in one process, not in {processes.count}: start it without a launcher"
        )
    task = make_task(spec, processes)
    assert isinstance(task, ImageTask)
    # An engine skips blocks if it is built for it, and only at the steps that a request names.
    rollout = caches_to_try(config.rollout)[0] if cache else config.rollout
    options = engine_options(rollout, spec.chunk_size)
    engine = make_engine(spec.engine_class, options, task.model)
    batch = PromptBatch(step=0, prompts=prompts, slots=range(len(prompts)))
    try:
        fresh = {n: p.detach() for n, p in lora_parameters(task.model.network).items()}
        engine.sync_weights(fresh, 0)
        tails, caches = try_savings(spec, task, engine, batch, tail=tail, cache=cache)
        lora = Lora(*plant_movements(task.model.network, config.trainer.seed))
        rollouts = sample_all(spec, task.model, engine, lora, prompts)
    finally:
        engine.close()
    mismatches, bound, diagnosis = compare(spec, task, rollouts, lora)
    settings = choose(spec, bound, mode=mode, doubt=diagnosis.doubt)
    for savings in filter(None, (tails, caches)):
        settings = with_cheapest(settings, savings)
    clipped: dict[float, float] = {}
    if bound is not None:
        chosen = settings.values[f"{DIFFUSION_KEY}.{bound.key}"]
        values = sorted({bound.reference, bound.configured, chosen})
        clipped = {value: bound.exceeded(value) for value in values if value < math.inf}
    mixed = config.trainer.mixed_precision
    subject = {
        "model": config.model.path,
        "trainer": config.model.dtype if mixed == "no" else mixed,
        "engine": config.rollout.name,
        "precision": config.rollout.spec().dtype,
        "guidance": mismatches[0].guidance,
        "window": list(config.rollout.window()),
        "sde_type": config.rollout.algo.sde_type,
        "loss_mode": config.actor.diffusion_loss.loss_mode,
        "log_prob_convention": config.rollout.algo.log_prob_convention,
        "samples": len(rollouts.many.batch),
    }
    return Calibration(
        subject=subject,
        mismatches=mismatches,
        bound=bound,
        clipped=clipped,
        diagnosis=diagnosis,
        settings=settings,
        tails=tails,
        caches=caches,
    )


class Rollouts(NamedTuple):
    """Holds what an engine sampled: many samples, and a few for the replays."""

    many: RecordedRollout
    few: RecordedRollout
    other: RecordedRollout  # at another guidance
    whitespace: RecordedRollout  # of a prompt with whitespace planted in it
    read_back: Sequence[Symptom]  # from `check_engine`
    says_seeds: bool  # whether the engine says that it draws the noise of the seeds


def sample_all(
    run: RunSpec,
    model: FlowModel,
    engine: RolloutEngine[Any],
    lora: Lora,
    prompts: Sequence[Prompt],
) -> Rollouts:
    """Samples after the engine was given the LoRA of both movements, as versions 1 and 2."""
    config = run.config
    for version, state in ((1, lora.before), (2, lora.current)):
        engine.sync_weights(state, version)
    spec = config.rollout.spec(tf32=config.trainer.tf32)
    few, whitespace = prompts[: FEW[0]], replace(prompts[0], text=PLANTED)
    all_prompts = ask(config, prompts, config.rollout.n, spec, keep_means=True)
    centered = config.algorithm.rollout_correction.centered
    needs_means = centered or run.loss_needs_means
    return Rollouts(
        read_back=[*check_engine(engine, lora.current, spec)],
        many=sample(engine, all_prompts, needs_means=needs_means),
        few=sample(engine, ask(config, few, FEW[1], spec)),
        other=sample(engine, ask(config, few, FEW[1], other_guidance(model, spec))),
        whitespace=sample(engine, ask(config, [whitespace], FEW[1], spec)),
        says_seeds=engine.draws_seed_noise,
    )


def compare(
    run: RunSpec, task: ImageTask, rollouts: Rollouts, lora: Lora
) -> tuple[list[Mismatch], Bound | None, Diagnosis]:
    """Evaluates the engine's samples by the trainer and, one after the other, by copies of it.

    Returns the mismatches (of the engine over many samples and at another guidance, then of copies,
    the one in the engine's precision first), the bound of the loss, and what explains the mismatch.
    """
    config, model = run.config, task.model
    micro = config.actor.ppo_micro_batch_size_per_gpu
    few = (rollouts.few, rollouts.other)

    def trainer(rollout: RecordedRollout) -> Evaluation:
        measured = task.policy.measure(rollout.batch, micro)
        keys = "model.dtype and trainer.mixed_precision"
        require_finite(rollout, measured.log_probs, "trainer", keys)
        return measured

    def copied(dtype: str, options: Sequence[RolloutOption]) -> tuple[Copy, list[Mismatch]]:
        copy = Copy(model, dtype, run.chunk_size, options)
        return copy, [mismatch_of(*each, copy) for each in compared]

    many = trainer(rollouts.many)
    guidance = [model.cfg_value(model.cfg_scale(rollout.request.spec)) for rollout in few]
    whole = mismatch_of(rollouts.many, many.log_probs, guidance[0])
    log_probs = [trainer(rollout).log_probs for rollout in few]
    compared = list(zip(few, log_probs, guidance, strict=True))
    engine, engine_other = (mismatch_of(*each) for each in compared)
    # Each copy is gone before the next is made.
    options = config.rollout.options()
    others = [copied(name, unquantized(options))[1] for name in other_precisions(config)]
    rollout_copy, copy_mismatches = copied(config.rollout.dtype, options)
    copies = [copy_mismatches, *others]
    lora_scale = config.model.lora_alpha / config.model.lora_rank
    replay, whitespace = (
        Replay(rollout_copy, rollout, lora, lora_scale)
        for rollout in (rollouts.few, rollouts.whitespace)
    )
    symptoms = [
        *check_record(rollouts.few, model, version=2),
        *check_means(rollouts.many.batch),
        *rollouts.read_back,
        *check_prompts(rollouts.whitespace, model),
    ]
    noisy = rollouts.many.batch
    if noisy.prev_sample_mean is None:  # the engine records none: the trainer's stand in
        means = task.policy.measure(noisy, micro, keep_means=True).means
        noisy = noisy.replace(prev_sample_mean=means)
    noise = check_noise(noisy, says_seeds=rollouts.says_seeds)
    of_few = [copy[0] for copy in copies]
    diagnosis = diagnose(replay, engine, of_few, symptoms, noise, whitespace)
    shown = [each for copy in copies for each in copy if each.precision != same_as_trainer(config)]
    bound = bound_of(run, whole.differences, many)
    return [whole, engine_other, *shown], bound, diagnosis


def _checked_prompts(spec: RunSpec, num_prompts: int, mode: str) -> list[Prompt]:
    """Returns the first prompts that training would take; refuses what cannot be calibrated."""
    config = spec.settings
    refuse(
        (
            spec.is_text,
            f"calibrate knows flow models, model.kind=diffusion; model.kind={config.model.kind}, "
            "whose mismatch the metrics of a first step show",
        ),
        (
            spec.mode is None,
            f"{DIFFUSION_KEY}.loss_mode={config.actor.diffusion_loss.loss_mode} knows no "
            "log-probs, so there is no mismatch to calibrate for",
        ),
        (
            config.data.replay_dir is not None,
            f"data.replay_dir={config.data.replay_dir}: calibrate measures an engine; drop it",
        ),
        (num_prompts < 1, f"--prompts {num_prompts}: give at least 1"),
    )
    prompts = check_run(spec, trains=False).prompts.sampler.prompts
    check_modes(spec, mode)
    if num_prompts > len(prompts):
        raise ValueError(f"--prompts {num_prompts}: data.train_files has {len(prompts)}")
    return PromptSampler(prompts, num_prompts, config.trainer.seed).step(0)
