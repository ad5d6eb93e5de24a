"""Checks of settings against each other: of one section against another, with no look at any file.

Each section checks itself, in its `validate`. What needs two sections is here. A setting that would
have no effect is an error.
"""

from __future__ import annotations

from operator import attrgetter

import torch

from flowgrpo_rc.config.check_forward import check_trained_on
from flowgrpo_rc.config.tree import Config
from flowgrpo_rc.losses.base import DIFFUSION_KEY
from flowgrpo_rc.losses.config import DiffusionLossConfig, TokenLossConfig
from flowgrpo_rc.rewards.manager import check_kind, validate_rewards

# What a reward may score, by the kind of the model.
SCORED = {"diffusion": ("image", "video", "latent"), "causal_lm": ("text",)}
# Keys and sections that one kind of model alone reads.
OF_IMAGES = (
    "rollout.pipeline",
    "rollout.algo",
    "actor.diffusion_loss",
    "actor.steps_per_forward",
    "rollout.val_kwargs.num_inference_steps",
    "rollout.val_kwargs.guidance_scale",
    "rollout.val_kwargs.true_cfg_scale",
    "rollout.val_kwargs.guidance_scale_2",
    "data.negative_prompt",
)
OF_TEXT = (
    "rollout.val_kwargs.temperature",
    "actor.token_loss",
    "rollout.temperature",
    "rollout.prompt_length",
    "rollout.response_length",
)


def check_settings(config: Config, num_processes: int = 1) -> None:
    """Checks all settings by themselves and against each other, without reading a file."""
    config.model.validate()
    config.rollout.validate()
    config = config.with_fixed_clip()
    config.actor.validate()
    config.algorithm.validate()
    config.trainer.validate()
    validate_rewards(config.reward)
    check_kind(config.reward, *SCORED[config.model.kind])
    if config.model.kind == "diffusion":
        check_trained_on(config)
    _check_sizes(config, num_processes)
    if config.actor.replay == "aligned":
        _check_alignment(config)
    _check_other_kind(config)
    _check_fp64(config)
    _check_correction(config)
    _check_replayed(config)
    _check_average(config)


def _check_sizes(config: Config, num_processes: int) -> None:
    """A step is whole mini-batches, and a process's share of one is whole micro-batches."""
    prompts = config.data.train_batch_size
    mini = config.actor.ppo_mini_batch_size
    if prompts < 1 or prompts % mini:
        raise ValueError(
            f"data.train_batch_size={prompts} prompts are no whole number of mini-batches of "
            f"actor.ppo_mini_batch_size={mini} prompts"
        )
    if mini % num_processes:
        raise ValueError(
            f"actor.ppo_mini_batch_size={mini} prompts cannot be shared evenly by {num_processes} "
            "processes (a group of samples stays on one)"
        )
    samples = config.samples_per_mini_batch(num_processes)
    micro = config.actor.ppo_micro_batch_size_per_gpu
    if samples % micro:
        chosen = config.trained_n()
        each = f"actor.train_n={chosen}" if chosen else f"rollout.n={config.rollout.n}"
        raise ValueError(
            f"actor.ppo_micro_batch_size_per_gpu={micro} does not divide the {samples} samples of "
            f"a mini-batch on one process (actor.ppo_mini_batch_size={mini} x {each} / "
            f"{num_processes})"
        )
    steps = config.actor.steps_per_forward
    if config.model.kind == "diffusion" and (steps or 1) > config.trained_steps():
        trained = f"a window has {config.trained_steps()} SDE steps (rollout.algo.sde_window_size)"
        if config.actor.diffusion_loss.forward is not None:
            trained = f"a sample has {config.trained_steps()} noise levels ({DIFFUSION_KEY}.times)"
        raise ValueError(
            f"actor.steps_per_forward={steps}: {trained}; give at most that, or null for all of "
            "them"
        )
    chunk = config.rollout.micro_batch_size_per_gpu
    if chunk is not None and chunk < 1:
        raise ValueError(f"rollout.micro_batch_size_per_gpu={chunk}: give at least 1, or null")


def _check_alignment(config: Config) -> None:
    """A micro-batch has to be a batch of the rollout; `_check_sizes` has seen the mini-batch."""
    if config.model.kind == "causal_lm":
        raise ValueError(
            "actor.replay=aligned is for images: text is sampled one token after the other and "
            "evaluated at once (model.kind=causal_lm); drop it"
        )
    if config.data.replay_dir is not None:
        raise ValueError(
            "actor.replay=aligned: a saved rollout (data.replay_dir) does not tell which samples "
            "were evaluated together; drop one of them"
        )
    if config.actor.steps_per_forward != 1:
        raise ValueError(
            "actor.replay=aligned evaluates together what the rollout did, one step of each "
            f"sample, but actor.steps_per_forward={config.actor.steps_per_forward}: set it to 1, "
            "or drop actor.replay"
        )
    if config.trained_n() is not None:
        raise ValueError(
            "actor.replay=aligned evaluates together what the rollout did, but actor.train_n="
            f"{config.actor.train_n} leaves samples out: set it to null, or drop actor.replay"
        )
    chunk = config.rollout.micro_batch_size_per_gpu
    micro = config.actor.ppo_micro_batch_size_per_gpu
    if chunk not in (None, micro):
        raise ValueError(
            "actor.replay=aligned evaluates together what the rollout did, but "
            f"rollout.micro_batch_size_per_gpu={chunk} and "
            f"actor.ppo_micro_batch_size_per_gpu={micro}: make them equal (or the former null); "
            "they have to divide the samples of a mini-batch on one process"
        )


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


def _check_correction(config: Config) -> None:
    """Refuses what the rollout correction cannot do with the loss and the sampler."""
    correction, actor = config.algorithm.rollout_correction, config.actor
    if correction.bypass_mode and actor.old_log_probs != "auto":
        raise ValueError(
            f"actor.old_log_probs={actor.old_log_probs} has no effect with "
            "algorithm.rollout_correction.bypass_mode=true, where the old log-probs are the "
            "rollout's: drop it, or set bypass_mode=false"
        )
    if config.model.kind == "causal_lm":
        _check_correction_of_text(config)
    for key, mode, own in (
        ("token_loss", actor.token_loss.loss_mode, TokenLossConfig.loss_mode),
        ("diffusion_loss", actor.diffusion_loss.loss_mode, DiffusionLossConfig.loss_mode),
    ):
        if correction.loss_type == "reinforce" and mode != own:
            raise ValueError(
                f"actor.{key}.loss_mode={mode} has no effect with "
                "algorithm.rollout_correction.loss_type=reinforce: drop one of them"
            )
    _check_auto_bound(config)
    if config.rollout.algo.log_prob_convention == "peers":
        gaussian = (
            "set rollout.algo.log_prob_convention=gaussian, since that of the peers is no density"
        )
        if actor.diffusion_loss.loss().needs_density:
            raise ValueError(
                f"actor.diffusion_loss.loss_mode={actor.diffusion_loss.loss_mode} adds a KL to the "
                f"log-ratio: {gaussian}"
            )
        if correction.log_prob_scale == "sum":
            raise ValueError(
                f"algorithm.rollout_correction.log_prob_scale=sum makes a density: {gaussian}"
            )
    if actor.use_kl_loss and correction.bypass_mode and correction.rollout_is_batch_normalize:
        raise ValueError(
            "actor.use_kl_loss=true and "
            "algorithm.rollout_correction.rollout_is_batch_normalize=true cannot be combined in "
            "bypass mode, where the normalisation scales the whole gradient: drop one of them"
        )


def _check_auto_bound(config: Config) -> None:
    """Refuses a bound of the loss that follows the mismatch where there is none to follow."""
    section = config.actor.diffusion_loss
    correction = config.algorithm.rollout_correction
    for name in section.auto:
        setting = f"actor.diffusion_loss.{name}={vars(section)[name]}"
        if not correction.bypass_mode:
            raise ValueError(
                f"{setting} follows the mismatch between rollout and training graph, which is not "
                "in the ratio with algorithm.rollout_correction.bypass_mode=false: give a number, "
                "or set bypass_mode=true"
            )
        if config.data.replay_dir is not None:
            raise ValueError(
                f"{setting} follows the mismatch, which grows with every update where saved "
                "samples are trained on (data.replay_dir): give a number"
            )
        _check_follows(config, name, setting)


def _check_follows(config: Config, name: str, setting: str) -> None:
    """Refuses "auto:k" for an option whose quantity the loss does not tell."""
    section = config.actor.diffusion_loss
    if len(section.auto) > 1:
        raise ValueError(f"{setting}: only one option can follow the mismatch; give a number")
    if section.bounded_option(config.rollout.algo.log_prob_convention) != name:
        raise ValueError(
            f"{setting}: loss_mode={section.loss_mode} does not say what {name} bounds "
            "(`DiffusionLoss.bound`): give a number"
        )
    try:
        section.loss(torch.ones(1, 1, dtype=torch.float64))
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"{setting}: loss_mode={section.loss_mode} takes a number and no bound for each step, "
            f"[B, T] ({error}): give a number"
        ) from error


def _check_correction_of_text(config: Config) -> None:
    """Refuses what only images have: a schedule, Gaussian steps, log-probs that are means."""
    correction = config.algorithm.rollout_correction
    rules = correction.rules()
    refused = (
        (
            correction.bypass_level != "step",
            f"bypass_level={correction.bypass_level} has no effect: whole responses are corrected; "
            "drop it",
        ),
        (
            correction.centered,
            "centered=true compares the means of Gaussian steps, and tokens are none: drop it",
        ),
        (
            correction.log_prob_scale != "mean",
            f"log_prob_scale={correction.log_prob_scale} has no effect: a token's log-prob is no "
            "mean; drop it",
        ),
        (
            rules.needs_means,
            "rollout_rs=step_kl compares Gaussian steps, and tokens are none: take token_k3, the "
            "estimate of the same KL from log-probs",
        ),
        (
            bool(rules.auto),
            "rollout_rs_threshold=auto:k follows the mismatch of each denoising step, and that of "
            "a token depends on its probability and not on its position: give a number",
        ),
    )
    for holds, message in refused:
        if holds:
            raise ValueError(f"algorithm.rollout_correction.{message} (model.kind=causal_lm)")


def _check_replayed(config: Config) -> None:
    """Where saved trajectories are trained on, nothing is sampled for training."""
    for name in ("staleness", "workers", "quantization", "compile"):
        value = getattr(config.rollout, name)
        if value and config.data.replay_dir is not None:
            raise ValueError(
                f"rollout.{name}={value} has no effect with data.replay_dir: drop one of them"
            )
    interval = config.rollout.algo.sde_window_interval
    if interval is not None and config.data.replay_dir is not None:
        raise ValueError(
            f"rollout.algo.sde_window_interval={interval} has no effect with data.replay_dir: "
            "saved samples have their windows; drop one of them"
        )


def _check_average(config: Config) -> None:
    ema = config.actor.ema
    updates = config.total_updates()
    if ema.enable and ema.update_interval > updates:
        raise ValueError(
            f"actor.ema.update_interval={ema.update_interval} exceeds the {updates} updates of "
            "this run, so the average would stay where it starts: lower it, or set "
            "actor.ema.enable=false"
        )
