"""How much a planned run would sample, evaluate and update, and the operations that this takes."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from flowgrpo_rc.batch import SamplerSpec
from flowgrpo_rc.planning.activations import blank_inputs, measured
from flowgrpo_rc.planning.weights import Job, as_size

ASSUMED = 400e12  # operations that a card does in a second; the best of an H100 in bf16 is 990e12

Count = tuple[str, str, str]  # name, number, formula


def counts(job: Job) -> list[Count]:
    """Returns what a run would do."""
    passes = [(name, f"{number:,}", formula) for name, number, formula in forwards(job)]
    return [*_samples(job), *passes, *_updates(job)]


def _samples(job: Job) -> list[Count]:
    rollout, prompts = job.config.rollout, job.config.data.train_batch_size
    held_out = rollout.held_out_spec()
    pipeline, interval = rollout.pipeline, rollout.algo.sde_window_interval
    size, first, last = rollout.window()
    window = f"none of {pipeline.num_inference_steps}: the ODE"
    if size:
        window = f"{size} of the steps {first} to {last - 1}, of {pipeline.num_inference_steps}"
        if interval is not None:
            window += f"; sliding by one every {interval} training steps"
    latents = job.model.latent_shape(rollout.spec())
    shape = f"{' x '.join(map(str, latents))} for {_size(rollout.spec())}"
    passes = held_out.num_inference_steps * (2 if job.model.cfg_scale(held_out) > 1 else 1)
    on_a_rank = job.config.samples_per_step(job.processes)
    images = f"{prompts} prompts x {rollout.n}; {on_a_rank} on a rank"
    groups = f"{rollout.n} samples each; {prompts // job.processes} on a rank"
    count = prompts * job.config.trainer.total_training_steps
    blank = job.model.blank_conditioning(1, rollout.spec()).tensors()
    each = sum(tensor.nbytes for tensor in blank.values())
    formula = f"at most: {count:,} of training x {as_size(each)}, and held-out ones"
    kept = [("kept prompts", as_size(count * each), formula)]
    return [
        *(kept if job.config.model.prompt_cache else ()),
        (f"{job.model.makes}s per step", f"{prompts * rollout.n:,}", images),
        ("groups per step", f"{prompts:,}", groups),
        ("stochastic steps", str(size), window),
        ("latents of a sample", f"{math.prod(latents):,}", shape),
        ("forwards, held-out sample", str(passes), f"of {_size(held_out)}, in an evaluation"),
    ]


def _size(spec: SamplerSpec) -> str:
    frames = "" if spec.num_frames is None else f", {spec.num_frames} frames"
    return f"{spec.height} x {spec.width} pixels{frames}"


def forwards(job: Job) -> list[tuple[str, int, str]]:
    """Counts the forwards of one process in one step by kind; those with a backward come last.

    With guidance a sample takes two.
    """
    config, actor, rollout = job.config, job.config.actor, job.config.rollout
    each_sample, guidance = _guidance(job)
    on_a_rank = config.samples_per_step(job.processes)
    steps = range(1, config.trainer.total_training_steps + 1)
    # A sliding window changes how many steps lie behind it.
    denoising = round(sum(map(rollout.evaluations, steps)) / len(steps))
    formula = f"{on_a_rank} samples x {denoising} steps{guidance}"
    rows = [("forwards, sampling", on_a_rank * denoising * each_sample, formula)]
    num_trained = config.trained_per_step(job.processes)
    if rollout.redraw:
        number = num_trained * denoising * each_sample
        formula = f"{num_trained} chosen samples x {denoising} steps{guidance}"
        rows.append(("forwards, redrawn", number, formula))
    each = config.trained_steps() * each_sample
    trained = num_trained * each
    updated = trained * actor.ppo_epochs
    old = "forwards, old policy"
    if config.knows_no_log_probs():
        rows.append((old, updated, "no gradient; beside those with backward"))
    elif not config.algorithm.rollout_correction.corrects_in_loss:
        why = config.why_recompute()
        if why is not None:
            # While rewards are scored nobody knows yet which samples are trained on.
            rows.append((old, on_a_rank * each, f"no gradient; of every mini-batch: {why}"))
        else:
            first = trained * actor.ppo_mini_batch_size // config.data.train_batch_size
            which = "of all mini-batches but the first, whose own forwards serve"
            rows.append((old, trained - first, f"no gradient; {which}"))
    formula = f"{num_trained} samples x {_trained_steps(job)}{guidance}"
    if actor.ppo_epochs > 1:
        formula += f" x {actor.ppo_epochs} epochs"
    if actor.use_kl_loss:
        rows.append(("forwards, reference", updated, f"{formula}, no gradient (KL)"))
    return [*rows, ("forwards with backward", updated, formula)]


def _guidance(job: Job) -> tuple[int, str]:
    """Returns the forwards of a sample at one step, and what they add to a formula."""
    guided = job.model.cfg_scale(job.config.rollout.spec()) > 1
    return (2, " x 2 (guidance)") if guided else (1, "")


def _trained_steps(job: Job) -> str:
    what = "noise levels" if job.config.knows_no_log_probs() else "stochastic steps"
    return f"{job.config.trained_steps()} {what}"


def _updates(job: Job) -> list[Count]:
    config, actor = job.config, job.config.actor
    each_sample, guidance = _guidance(job)
    prompts = config.data.train_batch_size
    mini = config.samples_per_mini_batch(job.processes)
    micro = actor.ppo_micro_batch_size_per_gpu
    size = config.trained_steps()
    together = actor.steps_per_forward or size
    updates = prompts // actor.ppo_mini_batch_size * actor.ppo_epochs
    steps = config.trainer.total_training_steps
    images = f"{steps * prompts * config.rollout.n:,} {job.model.makes}s in all"
    rows = f"{micro} samples x {together} steps at once{guidance}; its activations grow with them"
    mini_batches = f"{actor.ppo_mini_batch_size} prompts each, {mini} samples on a rank"
    micro_batches = f"{mini} / {micro} samples x {_trained_steps(job)}, {together} at once"
    return [
        ("mini-batches per step", str(updates), mini_batches),
        ("micro-batches each", f"{mini // micro * math.ceil(size / together)}", micro_batches),
        ("rows of a micro-batch", f"{micro * together * each_sample}", rows),
        ("steps", f"{steps:,}", images),
        ("updates", f"{config.total_updates():,}", f"{updates} per step"),
    ]


class Operations(NamedTuple):
    """Floating-point operations of a sample at a denoising step; a product and a sum are two."""

    forward: int  # of a forward without gradient, one of two where there is guidance
    update: int  # of a forward with its backward

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

    each_sample, _ = _guidance(job)
    forward, update = (
        measured(model.transformer, partial(counted, with_gradient=gradient)) // each_sample
        for gradient in (False, True)
    )
    return Operations(forward, update)


def told(number: int) -> Count:
    """Returns the row of a plan about the operations of one process in one step."""
    seconds = f"{number / ASSUMED:,.3g} s at {ASSUMED / 1e12:.0f} TFLOP a second"
    size = f"{number / 1e15:,.1f} PFLOP" if number >= 1e15 else f"{number / 1e12:,.2f} TFLOP"
    return "work of a rank", size, f"of the transformer in a step; {seconds}, which is assumed"
