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
    on_a_rank = job.spec.samples_per_step
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


def passes(job: Job) -> list[Pass]:
    """Returns the forwards of one process in one step, and what VAE and text encoders do.

    With guidance a sample takes two forwards.
    """
    config, actor, rollout = job.config, job.config.actor, job.config.rollout
    spec = job.spec
    num_trained = spec.trained_per_step
    each = spec.trained_n or rollout.n
    found = _sampling(job, "sampling", rollout, rollout.n)
    if rollout.redraw:
        found += _sampling(job, "redrawn", spec.trained_rollout, each)
    trained = _trained(job, num_trained, each)
    updated = trained * actor.ppo_epochs
    old, correction = "forwards, old policy", config.algorithm.rollout_correction
    if spec.mode is None:
        found.append((old, updated, "no gradient; beside those with backward", "forward"))
    elif spec.mode == "bypass":
        together = actor.steps_per_forward or spec.trained_steps
        if correction.bypass_level == "window" and together < spec.trained_steps:
            formula = "no gradient; a loss of whole windows has to see them first"
            found.append(("forwards, windows", updated, formula, "forward"))
    elif (why := spec.why_recompute) is not None:
        every = trained
        if not rollout.redraw:
            # While rewards are scored nobody knows yet which samples are trained on.
            every = _trained(job, spec.samples_per_step, rollout.n)
        found.append((old, every, f"no gradient; of every mini-batch: {why}", "forward"))
    else:
        first = trained * actor.ppo_mini_batch_size // config.data.train_batch_size
        which = "of all mini-batches but the first, whose own forwards serve"
        found.append((old, trained - first, f"no gradient; {which}", "forward"))
    formula = f"{num_trained} samples x {_trained_steps(job)}{guidance(job)[1]}"
    if actor.ppo_epochs > 1:
        formula += f" x {actor.ppo_epochs} epochs"
    if rollout.algo.shared_prefix:
        formula += "; where a window begins, one of a prompt in a micro-batch"
    if actor.use_kl_loss:
        kind = "forward" if actor.kl_reference == "start" else "base"
        found.append(("forwards, reference", updated, f"{formula}, no gradient (KL)", kind))
    found.append(("forwards with backward", updated, formula, "update"))
    if needs_samples(spec.rewards):
        decoded = spec.samples_per_step + (num_trained if rollout.redraw else 0)
        found.append(("decoded by the VAE", decoded, f"{job.model.makes}s", "VAE"))
    if config.model.prompt_cache is None:
        prompts = config.data.train_batch_size // job.processes + guidance(job)[0] - 1
        prompts *= 2 if rollout.redraw else 1
        formula = "a negative one with guidance; model.prompt_cache has none in a step"
        found.append(("encoded prompts", prompts, formula, "encoders"))
    return found


def _sampling(job: Job, name: str, rollout: RolloutConfig, each: int) -> list[Pass]:
    """Returns the forwards that draw `each` samples of a prompt: those of all blocks, and those
    that skip the middle ones. Mean of all training steps and of the places of a window.
    """
    takes, formula = guidance(job)
    samples = alike = job.config.data.train_batch_size // job.processes * each
    if rollout.algo.shared_prefix:
        alike = _groups(samples, each, job.spec.chunk_size)
        formula += "; one of a prompt in a chunk until they differ"
    rows, evaluated = [0.0, 0.0], 0
    last = job.config.trainer.total_training_steps
    for step in range(1, last + 1):
        size, first, end = rollout.window_at(step)
        starts, cached = range(first, end - size + 1), rollout.cached_steps(step)
        for index in range(rollout.evaluations(step)):
            # The samples of a prompt are the same up to their first noise.
            same = sum(start >= index for start in starts) / len(starts)
            rows[index in cached] += (samples + same * (alike - samples)) * takes / last
            evaluated += 1
    formula = f"{samples} samples x {round(evaluated / last)} steps{formula}"
    kind = "base" if rollout.merge_lora is True else "forward"
    found = [(f"forwards, {name}", round(rows[0]), formula, kind)]
    if rows[1]:
        saved = saved_share(job.model.network, 1, 1)
        formula = f"of cached steps, without {saved:.0%} of the blocks (rollout.cache)"
        found.append(("forwards, cached", round(rows[1]), formula, "cached"))
    return found


def _trained(job: Job, samples: int, each: int) -> int:
    """Counts the forwards of the training graph on samples, `each` of a prompt."""
    rows = samples * job.spec.trained_steps
    if job.config.rollout.algo.shared_prefix:
        # Where the window begins, the samples of a prompt have the same state.
        rows += _groups(samples, each, job.config.actor.ppo_micro_batch_size_per_gpu) - samples
    return rows * guidance(job)[0]


def _groups(samples: int, each: int, at_once: int) -> int:
    """Counts the prompts in each of the parts that samples are cut into, all together."""
    parts = (range(samples)[start : start + at_once] for start in range(0, samples, at_once))
    return sum(part[-1] // each - part[0] // each + 1 for part in parts)


def guidance(job: Job) -> tuple[int, str]:
    """Returns the forwards of a sample at one step, and what they add to a formula."""
    guided = job.model.cfg_scale(job.config.rollout.spec()) > 1
    return (2, " x 2 (guidance)") if guided else (1, "")


def _trained_steps(job: Job) -> str:
    what = "noise levels" if job.spec.mode is None else "stochastic steps"
    return f"{job.spec.trained_steps} {what}"


def _updates(job: Job) -> list[Count]:
    config, actor = job.config, job.config.actor
    each_sample, doubled = guidance(job)
    prompts = config.data.train_batch_size
    mini = job.spec.samples_per_mini_batch
    micro = actor.ppo_micro_batch_size_per_gpu
    size = job.spec.trained_steps
    together = actor.steps_per_forward or size
    updates = prompts // actor.ppo_mini_batch_size * actor.ppo_epochs
    steps = config.trainer.total_training_steps
    images = f"{steps * prompts * config.rollout.n:,} {job.model.makes}s in all"
    rows = f"{micro} samples x {together} steps at once{doubled}; its activations grow with them"
    mini_batches = f"{actor.ppo_mini_batch_size} prompts each, {mini} samples on a rank"
    micro_batches = f"{mini} / {micro} samples x {_trained_steps(job)}, {together} at once"
    return [
        ("mini-batches per step", str(updates), mini_batches),
        ("micro-batches each", f"{mini // micro * math.ceil(size / together)}", micro_batches),
        ("rows of a micro-batch", f"{micro * together * each_sample}", rows),
        ("steps", f"{steps:,}", images),
        ("updates", f"{job.spec.total_updates:,}", f"{updates} per step"),
    ]
