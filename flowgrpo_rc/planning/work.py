"""How much a planned run would sample, evaluate and update."""

from __future__ import annotations

import math

from flowgrpo_rc.batch import SamplerSpec
from flowgrpo_rc.models.block_cache import saved_share
from flowgrpo_rc.planning.weights import Job, as_size
from flowgrpo_rc.rewards.manager import needs_samples
from flowgrpo_rc.rollout.config import RolloutConfig

HELD_OUT = "held-out sample"
Count = tuple[str, str, str]  # name, number, formula
Pass = tuple[str, int, str, str]  # name, number, formula, the kind whose operations each takes


def counts(job: Job) -> list[Count]:
    """Returns what a run would do."""
    rows = [(name, f"{number:,}", formula) for name, number, formula, _ in passes(job)]
    return [*_samples(job), *rows, *_updates(job)]


def _samples(job: Job) -> list[Count]:
    rollout = job.config.rollout
    num_prompts = job.config.data.train_batch_size
    held_out = rollout.held_out_spec()
    num_steps = rollout.pipeline.num_inference_steps
    size, first, last = rollout.window()
    window = f"{size} of the steps {first} to {last - 1}, of {num_steps}"
    if not size:
        window = f"none of {num_steps}: the ODE"
    elif rollout.algo.sde_window_interval is not None:
        window += f"; sliding by one every {rollout.algo.sde_window_interval} training steps"
    latents = job.model.latent_shape(rollout.spec())
    shape = f"{' x '.join(map(str, latents))} for {_size(rollout.spec())}"
    forwards = held_out.num_inference_steps * (2 if job.model.cfg_scale(held_out) > 1 else 1)
    images = f"{num_prompts} prompts x {rollout.n}; {job.spec.samples_per_step} on a rank"
    groups = f"{rollout.n} samples each; {num_prompts // job.processes} on a rank"
    rows = [
        (f"{job.model.makes}s per step", f"{num_prompts * rollout.n:,}", images),
        ("groups per step", f"{num_prompts:,}", groups),
        ("stochastic steps", str(size), window),
        ("latents of a sample", f"{math.prod(latents):,}", shape),
        ("forwards, held-out sample", str(forwards), f"of {_size(held_out)}, in an evaluation"),
    ]
    if job.config.model.prompt_cache:
        count = num_prompts * job.config.trainer.total_training_steps
        blank = job.model.blank_conditioning(1, rollout.spec()).tensors()
        num_bytes = sum(tensor.nbytes for tensor in blank.values())
        formula = f"at most: {count:,} of training x {as_size(num_bytes)}, and held-out ones"
        rows.insert(0, ("kept prompts", as_size(count * num_bytes), formula))
    return rows


def _size(spec: SamplerSpec) -> str:
    frames = "" if spec.num_frames is None else f", {spec.num_frames} frames"
    return f"{spec.height} x {spec.width} pixels{frames}"


def passes(job: Job) -> list[Pass]:
    """Returns the forwards of one process in one step, and what VAE and text encoders do.

    With guidance a sample takes two forwards.
    """
    config = job.config
    actor = config.actor
    rollout = config.rollout
    spec = job.spec
    trained_n = spec.trained_n or rollout.n
    rows = _sampling(job, "sampling", rollout, rollout.n)
    if rollout.redraw:
        rows += _sampling(job, "redrawn", spec.trained_rollout, trained_n)
    trained = _trained(job, spec.trained_per_step, trained_n)
    updated = trained * actor.ppo_epochs
    old = "forwards, old policy"
    if spec.mode is None:
        rows.append((old, updated, "no gradient; beside those with backward", "forward"))
    elif spec.mode == "bypass":
        together = actor.steps_per_forward or spec.trained_steps
        whole_windows = config.algorithm.rollout_correction.bypass_level == "window"
        if whole_windows and together < spec.trained_steps:
            formula = "no gradient; a loss of whole windows has to see them first"
            rows.append(("forwards, windows", updated, formula, "forward"))
    elif spec.why_recompute is not None:
        recomputed = trained
        if not rollout.redraw:
            # While rewards are scored nobody knows yet which samples are trained on.
            recomputed = _trained(job, spec.samples_per_step, rollout.n)
        formula = f"no gradient; of every mini-batch: {spec.why_recompute}"
        rows.append((old, recomputed, formula, "forward"))
    else:
        first = trained * actor.ppo_mini_batch_size // config.data.train_batch_size
        formula = "no gradient; of all mini-batches but the first, whose own forwards serve"
        rows.append((old, trained - first, formula, "forward"))
    formula = f"{spec.trained_per_step} samples x {_trained_steps(job)}{guidance(job)[1]}"
    if actor.ppo_epochs > 1:
        formula += f" x {actor.ppo_epochs} epochs"
    if rollout.algo.shared_prefix:
        formula += "; where a window begins, one of a prompt in a micro-batch"
    if actor.use_kl_loss:
        kind = "forward" if actor.kl_reference == "start" else "base"
        rows.append(("forwards, reference", updated, f"{formula}, no gradient (KL)", kind))
    rows.append(("forwards with backward", updated, formula, "update"))
    if needs_samples(spec.rewards):
        decoded = spec.samples_per_step + (spec.trained_per_step if rollout.redraw else 0)
        rows.append(("decoded by the VAE", decoded, f"{job.model.makes}s", "VAE"))
    if config.model.prompt_cache is None:
        prompts = config.data.train_batch_size // job.processes + guidance(job)[0] - 1
        prompts *= 2 if rollout.redraw else 1
        formula = "a negative one with guidance; model.prompt_cache has none in a step"
        rows.append(("encoded prompts", prompts, formula, "encoders"))
    return rows


def _sampling(job: Job, name: str, rollout: RolloutConfig, n: int) -> list[Pass]:
    """Returns the forwards that draw `n` samples of a prompt: those of all blocks, and those that
    skip the middle ones. Mean of all training steps and of the places of a window.
    """
    per_step, formula = guidance(job)
    samples = alike = job.config.data.train_batch_size // job.processes * n
    if rollout.algo.shared_prefix:
        alike = _groups(samples, n, job.spec.chunk_size)
        formula += "; one of a prompt in a chunk until they differ"
    whole = cached = 0.0
    evaluated = 0
    last = job.config.trainer.total_training_steps
    for step in range(1, last + 1):
        size, first, end = rollout.window_at(step)
        starts = range(first, end - size + 1)
        cached_steps = rollout.cached_steps(step)
        for index in range(rollout.evaluations(step)):
            # The samples of a prompt are the same up to their first noise.
            same = sum(start >= index for start in starts) / len(starts)
            forwards = (samples + same * (alike - samples)) * per_step / last
            if index in cached_steps:
                cached += forwards
            else:
                whole += forwards
            evaluated += 1
    formula = f"{samples} samples x {round(evaluated / last)} steps{formula}"
    kind = "base" if rollout.merge_lora is True else "forward"
    rows = [(f"forwards, {name}", round(whole), formula, kind)]
    if cached:
        saved = saved_share(job.model.network, 1, 1)
        formula = f"of cached steps, without {saved:.0%} of the blocks (rollout.cache)"
        rows.append(("forwards, cached", round(cached), formula, "cached"))
    return rows


def _trained(job: Job, samples: int, n: int) -> int:
    """Counts the forwards of the training graph on samples, `n` of a prompt."""
    rows = samples * job.spec.trained_steps
    if job.config.rollout.algo.shared_prefix:
        # Where the window begins, the samples of a prompt have the same state.
        rows += _groups(samples, n, job.config.actor.ppo_micro_batch_size_per_gpu) - samples
    return rows * guidance(job)[0]


def _groups(samples: int, n: int, at_once: int) -> int:
    """Counts the prompts in each of the chunks that samples are cut into, all together."""
    chunks = (range(samples)[start : start + at_once] for start in range(0, samples, at_once))
    return sum(chunk[-1] // n - chunk[0] // n + 1 for chunk in chunks)


def guidance(job: Job) -> tuple[int, str]:
    """Returns the forwards of a sample at one step, and what they add to a formula."""
    guided = job.model.cfg_scale(job.config.rollout.spec()) > 1
    return (2, " x 2 (guidance)") if guided else (1, "")


def _trained_steps(job: Job) -> str:
    what = "noise levels" if job.spec.mode is None else "stochastic steps"
    return f"{job.spec.trained_steps} {what}"


def _updates(job: Job) -> list[Count]:
    config = job.config
    actor = config.actor
    per_step, guided = guidance(job)
    mini = job.spec.samples_per_mini_batch
    micro = actor.ppo_micro_batch_size_per_gpu
    together = actor.steps_per_forward or job.spec.trained_steps
    forwards = math.ceil(job.spec.trained_steps / together)
    updates = config.data.train_batch_size // actor.ppo_mini_batch_size * actor.ppo_epochs
    steps = config.trainer.total_training_steps
    images = steps * config.data.train_batch_size * config.rollout.n
    rows = f"{micro} samples x {together} steps at once{guided}; its activations grow with them"
    mini_batches = f"{actor.ppo_mini_batch_size} prompts each, {mini} samples on a rank"
    micro_batches = f"{mini} / {micro} samples x {_trained_steps(job)}, {together} at once"
    return [
        ("mini-batches per step", str(updates), mini_batches),
        ("micro-batches each", str(mini // micro * forwards), micro_batches),
        ("rows of a micro-batch", str(micro * together * per_step), rows),
        ("steps", f"{steps:,}", f"{images:,} {job.model.makes}s in all"),
        ("updates", f"{job.spec.total_updates:,}", f"{updates} per step"),
    ]
