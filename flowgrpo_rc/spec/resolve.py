"""From words to objects: a configuration and a machine become a `RunSpec`, once for a command."""

from dataclasses import replace

from flowgrpo_rc.config.tree import Config
from flowgrpo_rc.correction.config import RolloutCorrectionConfig
from flowgrpo_rc.losses.auto_clip import bounded_option
from flowgrpo_rc.losses.base import DiffusionLoss, ImageLoss
from flowgrpo_rc.losses.config import DECOUPLED_CLIP, DiffusionLossConfig
from flowgrpo_rc.losses.find import option_names
from flowgrpo_rc.rewards.manager import build_terms, settle_rewards
from flowgrpo_rc.rollout.devices import AUTO, sampling_dtype
from flowgrpo_rc.spec.check_folder import config_of_run
from flowgrpo_rc.spec.run_spec import Machine, RunSpec

_CLIP = "clip_ratio"


def resolve(config: Config, machine: Machine) -> RunSpec:
    """Makes the run spec: each section by itself, then what is left open between them.

    A run that goes on in `trainer.output_dir` keeps what it has decided, but for merged weights
    where they are sharded now. Only the folder of that run is read, and no library of models is
    imported; `check` says whether the run is possible.

    Raises:
      ValueError: for a setting that its own section refuses.
    """
    config.model.validate()
    config.rollout.validate()
    config.actor.validate()
    rules = config.algorithm.validate()
    config.trainer.validate()
    rewards = build_terms(config.reward)
    earlier = config_of_run(config)
    reward = settle_rewards(config.reward, rewards, earlier.reward if earlier else None)
    rollout = config.rollout
    if rollout.dtype == AUTO:
        dtype = earlier.rollout.dtype if earlier else sampling_dtype(machine.device)
        rollout = replace(rollout, dtype=dtype)
    settings = replace(config, reward=reward, rollout=rollout)
    if config.model.kind == "causal_lm":
        loss = config.actor.token_loss.validate()
        return RunSpec(config, settings, earlier, machine, loss, rules, rewards)
    section, image_loss = _with_fixed_clip(config)
    settings = replace(settings, actor=replace(config.actor, diffusion_loss=section))
    return RunSpec(config, settings, earlier, machine, image_loss, rules, rewards)


def _with_fixed_clip(config: Config) -> tuple[DiffusionLossConfig, ImageLoss]:
    """Returns the section of the loss and the loss, with a number for a `clip_ratio=auto:k` that
    follows no mismatch.
    """
    section, correction = config.actor.diffusion_loss, config.algorithm.rollout_correction
    if _CLIP not in section.auto:
        return section, section.validate()
    loss = section.loss()
    saved = config.data.replay_dir is not None
    number = _fixed_clip(loss, correction, config.rollout.algo.log_prob_convention, saved=saved)
    if number is None:
        return section, section.validate(loss)
    section = replace(section, clip_ratio=number)
    return section, section.validate()


def _fixed_clip(
    loss: ImageLoss, correction: RolloutCorrectionConfig, convention: str, *, saved: bool
) -> float | None:
    """Returns the number in place of `clip_ratio=auto:k`; None where it can follow the mismatch.

    In decoupled mode the ratio compares two forwards of the training graph, and from saved samples
    the policy moves away with every update. REINFORCE and some losses clip nothing: they get the
    default, which has no effect there.
    """
    if correction.loss_type == "reinforce" or _CLIP not in option_names(type(loss)):
        return float(DiffusionLossConfig().clip_ratio)
    assert isinstance(loss, DiffusionLoss)  # a loss of finished samples clips nothing
    if loss.needs_density:
        return None  # Guard's clip is on another scale: no number here could stand for it
    follows = correction.bypass_mode and not saved
    if follows and bounded_option(loss, convention) == _CLIP:
        return None
    return DECOUPLED_CLIP
