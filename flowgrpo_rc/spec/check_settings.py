"""Checks of settings against each other: of one section against another, with no look at any file.

Each section checks itself, in its `validate`. What needs two sections is here. A setting that would
have no effect is an error.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import fields
from operator import attrgetter

import torch

from flowgrpo_rc.config.tree import Config
from flowgrpo_rc.correction.config import RolloutCorrectionConfig, Rules
from flowgrpo_rc.correction.thresholds import KEY
from flowgrpo_rc.losses.auto_clip import bounded_option
from flowgrpo_rc.losses.base import DIFFUSION_KEY, ImageLoss
from flowgrpo_rc.losses.config import DiffusionLossConfig, TokenLossConfig
from flowgrpo_rc.rewards.manager import check_kind
from flowgrpo_rc.rollout.config import SAMPLED
from flowgrpo_rc.spec.run_spec import RunSpec, shares_evenly

# What a reward may score, by the kind of the model.
SCORED = {"diffusion": ("image", "video", "latent"), "causal_lm": ("text",)}
# Keys and sections that one kind of model alone reads.
OF_IMAGES = (
    "rollout.pipeline",
    "rollout.algo",
    "actor.diffusion_loss",
    "actor.steps_per_forward",
    *(f"rollout.val_kwargs.{name}" for name in SAMPLED),
    "data.negative_prompt",
)
OF_TEXT = (
    "model.chat_template_kwargs",
    "rollout.val_kwargs.temperature",
    "actor.token_loss",
    "rollout.temperature",
    "rollout.prompt_length",
    "rollout.response_length",
)


def check_settings(spec: RunSpec) -> None:
    """Checks all settings against each other, without reading a file."""
    config = spec.settings
    check_kind(spec.rewards, *SCORED[config.model.kind])
    if not spec.is_text:
        _check_trained_on(spec)
    _check_sizes(spec)
    _check_other_kind(config)
    _check_fp64(config)
    _check_correction(spec)
    _check_replayed(config)
    if config.algorithm.filter_groups.enable:
        _check_filter(config)
    _check_average(spec)


def refuse(*cases: tuple[object, str], about: str = "", end: str = "") -> None:
    """Raises ValueError with the first reason that holds, of (holds, reason)."""
    for holds, reason in cases:
        if holds:
            raise ValueError(f"{about}{reason}{end}")


def _check_trained_on(spec: RunSpec) -> None:
    """A loss of images trains on denoising steps, or on finished samples without log-probs."""
    config = spec.settings
    loss, mode = spec.forward_loss, config.actor.diffusion_loss.loss_mode
    size = config.rollout.algo.sde_window_size
    named = f"{DIFFUSION_KEY}.loss_mode={mode}"
    if loss is None:
        if size == 0:
            raise ValueError(
                f"rollout.algo.sde_window_size=0 leaves {named} no stochastic step to train on: "
                "give at least 1, or a loss of finished samples, loss_mode=diffusion_nft"
            )
        return
    if size != 0:
        raise ValueError(
            f"{named} trains on finished samples, which the ODE makes: set "
            f"rollout.algo.sde_window_size=0 (it is {'null' if size is None else size})"
        )
    times, levels = loss.times, config.rollout.evaluations()
    refuse(
        (
            times is not None and times > levels,
            f"times={times}: the schedule has {levels} noise levels "
            "(rollout.pipeline.num_inference_steps); give at most that, or null for all",
        ),
        (
            config.actor.diffusion_loss.adv_clip_max == math.inf,
            f"adv_clip_max=inf: {mode} divides advantages by it; give a number",
        ),
        about=f"{DIFFUSION_KEY}.",
    )
    for setting, default in _about_log_probs(spec):
        raise ValueError(
            f"{setting} has no effect with {named}, which knows no log-probs: drop it, or give its "
            f"default where a file sets it, {default}"
        )
    refuse(
        (config.data.replay_dir is not None, f"data.replay_dir={config.data.replay_dir}"),
        (config.trainer.save_rollouts, "trainer.save_rollouts=true"),
        about=f"{named} trains on finished samples, and not on recorded steps: drop it, or ",
    )


def _about_log_probs(spec: RunSpec) -> Iterator[tuple[str, str]]:
    """Yields settings about log-probs that are not the default, and the default."""
    config = spec.settings
    correction = config.algorithm.rollout_correction
    for field in fields(RolloutCorrectionConfig):
        value = getattr(correction, field.name)
        off = (field.default, False) if field.name == "centered" else (field.default,)
        if value not in off:
            default = "null" if field.default is None else str(field.default).lower()
            yield f"{KEY}.{field.name}={value}", f"{KEY}.{field.name}={default}"


def _check_sizes(spec: RunSpec) -> None:
    """A step is whole mini-batches, and a process's share of one is whole micro-batches."""
    config = spec.settings
    prompts, mini = config.data.train_batch_size, config.actor.ppo_mini_batch_size
    if prompts < 1 or prompts % mini:
        raise ValueError(
            f"data.train_batch_size={prompts} is no multiple of actor.ppo_mini_batch_size={mini}"
        )
    if not shares_evenly(config, spec.machine.num_processes):
        raise ValueError(_uneven(spec))
    steps = config.actor.steps_per_forward
    if config.model.kind == "diffusion" and (steps or 1) > spec.trained_steps:
        of = "SDE steps (rollout.algo.sde_window_size)"
        if spec.forward_loss is not None:
            of = f"noise levels ({DIFFUSION_KEY}.times)"
        raise ValueError(
            f"actor.steps_per_forward={steps}: a sample is trained on {spec.trained_steps} "
            f"{of}; give at most that, or null for all"
        )


def _uneven(spec: RunSpec) -> str:
    """Says why a process gets no whole groups or micro-batches, and the nearest sizes that fit."""
    config = spec.settings
    num_processes = spec.machine.num_processes
    mini, micro = config.actor.ppo_mini_batch_size, config.actor.ppo_micro_batch_size_per_gpu
    chosen, samples = spec.trained_n, spec.samples_per_mini_batch
    if mini % num_processes == 0:
        each = f"actor.train_n={chosen}" if chosen else f"rollout.n={config.rollout.n}"
        fits = [size for size in range(1, samples + 1) if samples % size == 0]
        return (
            f"actor.ppo_micro_batch_size_per_gpu={micro} does not divide the {samples} samples of "
            f"a mini-batch on one process (actor.ppo_mini_batch_size={mini} x {each} / "
            f"{num_processes}): give {_nearest(fits, micro)}"
        )
    # A process takes whole groups, as many as fill whole micro-batches.
    step = num_processes * micro // math.gcd(micro, chosen or config.rollout.n)
    numbers = [number for number in range(1, mini + 1) if shares_evenly(config, number)]
    start = f"start {_nearest(numbers, num_processes)} process(es), or " if numbers else ""
    return (
        f"actor.ppo_mini_batch_size={mini} prompts cannot be shared evenly by {num_processes} "
        f"processes (a group of samples stays on one): {start}give "
        f"{_nearest(range(step, mini + step + 1, step), mini)} (data.train_batch_size: a multiple)"
    )


def _nearest(sizes: Sequence[int], given: int) -> str:
    """Returns the largest size below the given one and the smallest above it, in words."""
    below, above = [s for s in sizes if s < given], [s for s in sizes if s > given]
    return " or ".join(map(str, below[-1:] + above[:1]))


def _check_other_kind(config: Config) -> None:
    """Refuses settings of images where text is made, and settings of text where images are."""
    default = Config()
    for key in OF_IMAGES if config.model.kind == "causal_lm" else OF_TEXT:
        read = attrgetter(key)
        if read(config) != read(default):
            raise ValueError(
                f"{key} is set but has no effect with model.kind={config.model.kind}: drop it"
            )


def _check_fp64(config: Config) -> None:
    wanted = "fp64" in (config.model.dtype, config.rollout.dtype)
    if wanted and (config.trainer.device, config.trainer.mixed_precision) != ("cpu", "no"):
        raise ValueError(
            f"model.dtype={config.model.dtype} and rollout.dtype={config.rollout.dtype}: fp64 is "
            "for exact comparisons on a CPU; set trainer.device=cpu and trainer.mixed_precision=no"
        )


def _check_correction(spec: RunSpec) -> None:
    """Refuses what the rollout correction cannot do with the loss and the sampler."""
    config = spec.settings
    correction, actor = config.algorithm.rollout_correction, config.actor
    if config.model.kind == "causal_lm":
        _check_correction_of_text(correction, spec.rules)
    images, text = actor.diffusion_loss.loss_mode, actor.token_loss.loss_mode
    if correction.loss_type == "reinforce":
        refuse(
            (text != TokenLossConfig.loss_mode, f"actor.token_loss.loss_mode={text}"),
            (images != DiffusionLossConfig.loss_mode, f"{DIFFUSION_KEY}.loss_mode={images}"),
            about=f"{KEY}.loss_type=reinforce has no clip: drop it, or ",
        )
    _check_auto_bound(spec)
    if config.rollout.algo.log_prob_convention == "peers":
        adds_kl = isinstance(spec.loss, ImageLoss) and spec.loss.needs_density
        refuse(
            (adds_kl, f"{DIFFUSION_KEY}.loss_mode={images}, which adds a KL to the log-ratio"),
            (correction.log_prob_scale == "sum", f"{KEY}.log_prob_scale=sum"),
            about="rollout.algo.log_prob_convention=peers is no density: set gaussian, or drop ",
        )
    if actor.kl_reference == "start":
        refuse(
            (not actor.use_kl_loss, "set actor.use_kl_loss=true"),
            (config.model.lora_path is None, "give model.lora_path; a new LoRA starts at the base"),
            about="actor.kl_reference=start has no effect here: drop it, or ",
        )
    if actor.use_kl_loss and correction.bypass_mode and correction.rollout_is_batch_normalize:
        raise ValueError(
            f"actor.use_kl_loss=true and {KEY}.rollout_is_batch_normalize=true: in bypass mode the "
            "normalisation would scale the KL, too; drop one of them"
        )


def _check_auto_bound(spec: RunSpec) -> None:
    """Refuses "auto:k", a bound of the loss that follows the mismatch, where none can be followed.

    There is one option at most whose quantity the loss tells.
    """
    config = spec.settings
    section = config.actor.diffusion_loss
    for name in section.auto:
        setting = f"{DIFFUSION_KEY}.{name}={vars(section)[name]}"
        bounds = bounded_option(spec.step_loss, config.rollout.algo.log_prob_convention)
        refuse(
            (
                not config.algorithm.rollout_correction.bypass_mode,
                f"with {KEY}.bypass_mode=false the ratio has no mismatch to follow: set "
                "bypass_mode=true",
            ),
            (
                config.data.replay_dir is not None,
                "the mismatch of saved samples (data.replay_dir) grows with every update",
            ),
            (len(section.auto) > 1, "only one option can follow the mismatch"),
            (
                bounds != name,
                f"loss_mode={section.loss_mode} does not say what {name} bounds "
                "(`DiffusionLoss.bound`)",
            ),
            about=f"{setting}: ",
            end=", or give a number",
        )
        try:
            section.bounded(spec.step_loss, torch.ones(1, 1, dtype=torch.float64))
        except (RuntimeError, TypeError, ValueError) as error:
            raise ValueError(
                f"{setting}: loss_mode={section.loss_mode} takes a number and no bound for each "
                f"step, [B, T] ({error}): give a number"
            ) from error


def _check_correction_of_text(correction: RolloutCorrectionConfig, rules: Rules) -> None:
    """Refuses what only images have: a schedule, Gaussian steps, log-probs that are means."""
    level, scale = correction.bypass_level, correction.log_prob_scale
    refuse(
        (level != "step", f"bypass_level={level} has no effect: whole responses are corrected"),
        (
            correction.centered,
            "centered=true compares the means of Gaussian steps, and tokens are none",
        ),
        (scale != "mean", f"log_prob_scale={scale} has no effect: a token's log-prob is no mean"),
        (
            rules.needs_means,
            "rollout_rs=step_kl compares Gaussian steps, and tokens are none; token_k3 estimates "
            "the same KL",
        ),
        (
            rules.auto,
            "rollout_rs_threshold=auto:k follows the mismatch of a denoising step; give a number",
        ),
        about=f"{KEY}.",
        end=" (model.kind=causal_lm)",
    )


def _check_replayed(config: Config) -> None:
    """Where saved trajectories are trained on, nothing is sampled for training."""
    for key in ("staleness", "workers", "quantization", "compile", "algo.sde_window_interval"):
        value = attrgetter(key)(config.rollout)
        if value and config.data.replay_dir is not None:
            given = f"rollout.{key}={value}"
            raise ValueError(f"{given} has no effect with data.replay_dir: drop one of them")


def _check_filter(config: Config) -> None:
    """Further prompts are sampled in the same step, with the same weights."""
    refuse(
        (config.data.replay_dir is not None, "data.replay_dir: nothing is sampled"),
        (config.rollout.staleness, "rollout.staleness: steps are asked for before this one ends"),
        (config.model.prompt_cache, "model.prompt_cache: further prompts are not known ahead"),
        about="algorithm.filter_groups.enable=true does not go with ",
        end="; drop one of them",
    )


def _check_average(spec: RunSpec) -> None:
    config = spec.settings
    ema, updates = config.actor.ema, spec.total_updates
    if ema.enable and ema.update_interval > updates:
        raise ValueError(
            f"actor.ema.update_interval={ema.update_interval} exceeds the {updates} updates of "
            "this run: lower it, or set actor.ema.enable=false"
        )
