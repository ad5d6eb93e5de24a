"""How much a planned run would sample, evaluate and update, and the operations that this takes."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from flowgrpo_rc.config.tree import Config
from flowgrpo_rc.planning.activations import blank_inputs, measured
from flowgrpo_rc.planning.weights import Job

ASSUMED = 400e12  # operations that a card does in a second; the best of an H100 in bf16 is 990e12


def counts(job: Job) -> list[tuple[str, str, str]]:
    """Returns what a run would do: name, number, formula."""
    passes = ((name, f"{number:,}", formula) for name, number, formula in forwards(job))
    return [*_samples(job), *passes, *_updates(job)]


def _samples(job: Job) -> list[tuple[str, str, str]]:
    rollout = job.config.rollout
    algo, pipeline = rollout.algo, rollout.pipeline
    prompts = job.config.data.train_batch_size
    size, first, last = rollout.window()
    window = f"none of {pipeline.num_inference_steps}: the ODE"
    if size:
        window = f"{size} of the steps {first} to {last - 1}, of {pipeline.num_inference_steps}"
        if algo.sde_window_interval is not None:
            every = f"every {algo.sde_window_interval} training steps"
            window += f"; sliding by one {every}"
    latents = job.model.latent_shape(rollout.spec())
    shape = " x ".join(map(str, latents))
    shape += f" for {pipeline.height} x {pipeline.width} pixels"
    if pipeline.num_frames is not None:
        shape += f", {pipeline.num_frames} frames"
    images = f"{prompts} prompts x {rollout.n}; {_per_rank(job)} on a rank"
    groups = f"{rollout.n} samples each; {prompts // job.processes} on a rank"
    return [
        (f"{job.model.makes}s per step", f"{prompts * rollout.n:,}", images),
        ("groups per step", f"{prompts:,}", groups),
        ("stochastic steps", str(size), window),
        ("latents of a sample", f"{math.prod(latents):,}", shape),
    ]


def forwards(job: Job) -> list[tuple[str, int, str]]:
    """Counts the forwards of one process in one step; those with a backward come last.

    With guidance a sample takes two.

    Returns:
      Name, number and formula of each kind.
    """
    config, actor, rollout = job.config, job.config.actor, job.config.rollout
    each_sample = _each_sample(job)
    guidance = " x 2 (guidance)" if each_sample == 2 else ""
    steps = range(1, config.trainer.total_training_steps + 1)
    # A sliding window changes how many steps lie behind it.
    denoising = round(sum(map(rollout.evaluations, steps)) / len(steps))
    sampled = _per_rank(job) * denoising * each_sample
    formula = f"{_per_rank(job)} samples x {denoising} steps{guidance}"
    rows = [("forwards, sampling", sampled, formula)]
    num_trained = config.trained_per_step(job.processes)
    trained = num_trained * config.trained_steps() * each_sample
    if config.knows_no_log_probs():
        old = trained * actor.ppo_epochs
        rows.append(("forwards, old policy", old, "no gradient; beside those with backward"))
    elif not config.algorithm.rollout_correction.corrects_in_loss:
        rows.append(_old_policy(job, trained))
    formula = f"{num_trained} samples x {_trained_steps(config)}{guidance}"
    if actor.ppo_epochs > 1:
        formula += f" x {actor.ppo_epochs} epochs"
    updated = trained * actor.ppo_epochs
    if actor.use_kl_loss:
        rows.append(("forwards, reference", updated, f"{formula}, no gradient (KL)"))
    return [*rows, ("forwards with backward", updated, formula)]


def _per_rank(job: Job) -> int:
    return job.config.samples_per_step(job.processes)


def _each_sample(job: Job) -> int:
    """Returns the forwards of a sample at one step."""
    return 2 if job.model.cfg_scale(job.config.rollout.spec()) > 1 else 1


def _trained_steps(config: Config) -> str:
    """Says what is trained of a sample."""
    what = "noise levels" if config.knows_no_log_probs() else "stochastic steps"
    return f"{config.trained_steps()} {what}"


def _old_policy(job: Job, trained: int) -> tuple[str, int, str]:
    """Counts the forwards of the old policy; the first mini-batch may need none of its own.

    Those of all mini-batches are made while rewards are scored, when nobody knows yet which samples
    are trained on.
    """
    config = job.config
    why = config.why_recompute()
    if why is not None:
        recomputed = _per_rank(job) * config.trained_steps() * _each_sample(job)
        which = f"of every mini-batch: {why}"
    else:
        prompts = config.data.train_batch_size
        recomputed = trained - trained * config.actor.ppo_mini_batch_size // prompts
        which = "of all mini-batches but the first, whose own forwards serve"
    return "forwards, old policy", recomputed, f"no gradient; {which}"


def _updates(job: Job) -> list[tuple[str, str, str]]:
    config, actor = job.config, job.config.actor
    prompts = config.data.train_batch_size
    mini = config.samples_per_mini_batch(job.processes)
    micro = actor.ppo_micro_batch_size_per_gpu
    size = config.trained_steps()
    together = actor.steps_per_forward or size
    guided = " x 2 (guidance)" if _each_sample(job) == 2 else ""
    updates = prompts // actor.ppo_mini_batch_size * actor.ppo_epochs
    steps = config.trainer.total_training_steps
    images = f"{steps * prompts * config.rollout.n:,} {job.model.makes}s in all"
    rows = f"{micro} samples x {together} steps at once{guided}; its activations grow with them"
    mini_batches = f"{actor.ppo_mini_batch_size} prompts each, {mini} samples on a rank"
    micro_batches = f"{mini} / {micro} samples x {_trained_steps(config)}, {together} at once"
    return [
        ("mini-batches per step", str(updates), mini_batches),
        ("micro-batches each", f"{mini // micro * math.ceil(size / together)}", micro_batches),
        ("rows of a micro-batch", f"{micro * together * _each_sample(job)}", rows),
        ("steps", f"{steps:,}", images),
        ("updates", f"{config.total_updates():,}", f"{updates} per step"),
    ]


class Operations(NamedTuple):
    """Floating-point operations of one sample at one denoising step; a product and a sum are two.

    Attributes:
      forward: of a forward without gradient, one of two where there is guidance.
      update: of a forward with its backward.
    """

    forward: int
    update: int

    def of_a_step(self, job: Job) -> int:
        """Returns the operations of one process in one step, of its transformer alone."""
        *others, (_, updated, _) = forwards(job)
        again = self.forward if job.config.model.gradient_checkpointing else 0
        without_gradient = sum(number for _, number, _ in others)
        return without_gradient * self.forward + updated * (self.update + again)


def operations(job: Job) -> Operations:
    """Counts the matrix products of a forward, and of a forward with its backward to the LoRA."""
    model, spec = job.model, job.config.rollout.spec()
    inputs = blank_inputs(model, 1, spec)

    def counted(network: Any, *, with_gradient: bool) -> int:
        # Kernels of attention that are fused hide their products from the counter.
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            with torch.set_grad_enabled(with_gradient):
                velocity = model.velocity(network, *inputs, spec)
            if with_gradient:
                velocity.square().mean().backward()
        return counter.get_total_flops()

    found = (
        measured(model.transformer, partial(counted, with_gradient=gradient))
        for gradient in (False, True)
    )
    return Operations(*(count // _each_sample(job) for count in found))


def told(number: int) -> tuple[str, str, str]:
    """Returns the row of a plan about the operations of one process in one step."""
    speed = f"{ASSUMED / 1e12:.0f} TFLOP a second"
    formula = (
        f"of the transformer in a step; {number / ASSUMED:,.3g} s at {speed}, which is assumed"
    )
    peta = number / 1e15
    size = f"{peta:,.1f} PFLOP" if peta >= 1 else f"{1000 * peta:,.2f} TFLOP"
    return "work of a rank", size, formula
