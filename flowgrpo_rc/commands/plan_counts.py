"""How much a planned run would sample, evaluate and update."""

from __future__ import annotations

import math

from flowgrpo_rc.config.tree import Config
from flowgrpo_rc.models.base import FlowModel

Row = tuple[str, str, str]


def counts(config: Config, model: FlowModel, num_processes: int) -> list[Row]:
    """Returns what a run would do: name, number, formula.

    Args:
      config: the settings.
      model: on the meta device.
      num_processes: how many processes share a step.
    """
    passes = forwards(config, model, num_processes)
    return [
        *_samples(config, model, num_processes),
        *((name, f"{number:,}", formula) for name, number, formula in passes),
        *_updates(config, model, num_processes),
    ]


def _samples(config: Config, model: FlowModel, num_processes: int) -> list[Row]:
    rollout = config.rollout
    prompts = config.data.train_batch_size
    images = prompts * rollout.n
    per_rank = config.samples_per_step(num_processes)
    size, first, last = rollout.window()
    steps = rollout.pipeline.num_inference_steps
    latents = math.prod(model.latent_shape(rollout.spec()))
    return [
        (
            f"{model.makes}s per step",
            f"{images:,}",
            f"{prompts} prompts x {rollout.n}; {per_rank} on a rank",
        ),
        (
            "groups per step",
            f"{prompts:,}",
            f"{rollout.n} samples each; {prompts // num_processes} on a rank",
        ),
        (
            "stochastic steps",
            str(size),
            f"{size} of the steps {first} to {last - 1}, of {steps}{_sliding(config)}"
            if size
            else f"none of {steps}: the ODE",
        ),
        ("latents of a sample", f"{latents:,}", _shape(config, model)),
    ]


def _sliding(config: Config) -> str:
    """Says how the window slides; nothing if it is drawn."""
    algo = config.rollout.algo
    if algo.sde_window_interval is None:
        return ""
    return f"; sliding, by {algo.sde_window_stride} every {algo.sde_window_interval} training steps"


def forwards(config: Config, model: FlowModel, num_processes: int) -> list[tuple[str, int, str]]:
    """Counts the forwards of one process in one step; those with a backward come last.

    With guidance a sample takes two.

    Args:
      config: the settings.
      model: on the meta device.
      num_processes: how many processes share a step.

    Returns:
      Name, number and formula of each kind.
    """
    actor = config.actor
    rollout = config.rollout
    guided = model.cfg_scale(rollout.spec()) > 1
    each_sample = 2 if guided else 1
    guidance = " x 2 (guidance)" if guided else ""
    per_rank = config.samples_per_step(num_processes)
    steps = range(1, config.trainer.total_training_steps + 1)
    # A sliding window changes how many steps lie behind it.
    denoising = round(sum(map(rollout.evaluations, steps)) / len(steps))
    size = config.trained_steps() * each_sample
    num_trained = config.trained_per_step(num_processes)
    trained = num_trained * size
    formula = f"{num_trained} samples x {_trained(config)}{guidance}"
    rows = [
        (
            "forwards, sampling",
            per_rank * denoising * each_sample,
            f"{per_rank} samples x {denoising} steps{guidance}",
        )
    ]
    if config.knows_no_log_probs():
        old = trained * actor.ppo_epochs
        rows.append(("forwards, old policy", old, "no gradient; beside those with backward"))
    elif not config.algorithm.rollout_correction.corrects_in_loss:
        rows.append(_old_policy(config, per_rank * size, trained))
    if actor.ppo_epochs > 1:
        formula += f" x {actor.ppo_epochs} epochs"
    updated = trained * actor.ppo_epochs
    if actor.use_kl_loss:
        rows.append(("forwards, reference", updated, f"{formula}, no gradient (KL)"))
    rows.append(("forwards with backward", updated, formula))
    return rows


def _trained(config: Config) -> str:
    """Says what is trained of a sample."""
    what = "noise levels" if config.knows_no_log_probs() else "stochastic steps"
    return f"{config.trained_steps()} {what}"


def _old_policy(config: Config, sampled: int, trained: int) -> tuple[str, int, str]:
    """Counts the forwards of the old policy; the first mini-batch may need none of its own.

    Those of all mini-batches are made while rewards are scored, when nobody knows yet which samples
    are trained on.

    Args:
      config: the settings.
      sampled: forwards of all samples of a step.
      trained: forwards of those that are trained on.
    """
    why = config.why_recompute()
    if why is not None:
        recomputed = sampled
        which = f"of every mini-batch: {why}"
    else:
        prompts = config.data.train_batch_size
        recomputed = trained - trained * config.actor.ppo_mini_batch_size // prompts
        which = "of all mini-batches but the first, whose own forwards serve"
    return "forwards, old policy", recomputed, f"no gradient; {which}"


def _updates(config: Config, model: FlowModel, num_processes: int) -> list[Row]:
    actor = config.actor
    prompts = config.data.train_batch_size
    images = prompts * config.rollout.n
    mini = config.samples_per_mini_batch(num_processes)
    micro = actor.ppo_micro_batch_size_per_gpu
    size = config.trained_steps()
    together = actor.steps_per_forward or size
    guidance = 2 if model.cfg_scale(config.rollout.spec()) > 1 else 1
    updates = prompts // actor.ppo_mini_batch_size * actor.ppo_epochs
    steps = config.trainer.total_training_steps
    return [
        (
            "mini-batches per step",
            str(updates),
            f"{actor.ppo_mini_batch_size} prompts each, {mini} samples on a rank",
        ),
        (
            "micro-batches each",
            f"{mini // micro * math.ceil(size / together)}",
            f"{mini} / {micro} samples x {_trained(config)}, {together} at once",
        ),
        (
            "rows of a micro-batch",
            f"{micro * together * guidance}",
            f"{micro} samples x {together} steps at once"
            f"{' x 2 (guidance)' if guidance == 2 else ''}; its activations grow with them",
        ),
        ("steps", f"{steps:,}", f"{steps * images:,} {model.makes}s in all"),
        ("updates", f"{config.total_updates():,}", f"{updates} per step"),
    ]


def _shape(config: Config, model: FlowModel) -> str:
    pipeline = config.rollout.pipeline
    frames = "" if pipeline.num_frames is None else f", {pipeline.num_frames} frames"
    shape = " x ".join(map(str, model.latent_shape(config.rollout.spec())))
    return f"{shape} for {pipeline.height} x {pipeline.width} pixels{frames}"
