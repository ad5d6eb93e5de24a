"""Says what was decided about a run: for its dry run, its plan, its first line and its pages."""

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from flowgrpo_rc.losses.base import ImageLoss
from flowgrpo_rc.losses.find import option_names
from flowgrpo_rc.spec.run_spec import RunSpec


def tell(spec: RunSpec, first_prompt: str = "") -> dict[str, str]:
    """Returns what a reader first asks about a run, by name.

    `first_prompt` is that of a language model, as tokens.
    """
    config = spec.config
    trainer = config.trainer
    facts = {
        "Model": config.model.hub_id() or PurePath(config.model.path).name,
        "Reward": _reward(spec),
        **(ratio(spec) or {"Loss and clip": _loss(spec)}),
        "Weights": _weights(spec),
        "Precision": _precision(spec),
        "LoRA": f"rank {config.model.lora_rank}, alpha {config.model.lora_alpha}",
        "First prompt": first_prompt,
        "Seed": str(trainer.seed),
    }
    return {name: value for name, value in facts.items() if value}


def lines_of(facts: Mapping[str, str]) -> str:
    """Returns facts for a terminal, a line for each."""
    return "\n".join(f"  {name:13}  {value}" for name, value in facts.items())


def ratio(spec: RunSpec) -> dict[str, str]:
    """Returns what the ratio of the loss is, what bounds it, and why; {} for a loss without one."""
    if spec.mode is None:
        return {}
    in_bypass = spec.mode == "bypass"
    anchor = "the rollout's policy" if in_bypass else "the recomputed old policy"
    setting = f"bypass_mode={str(in_bypass).lower()}"
    return {
        "Log-ratio": _log_ratio(spec),
        "Mode": f"{spec.mode} ({setting}), current policy over {anchor}",
        "Loss and clip": _loss(spec),
        "Rejection": _rejection(spec) or "none",
    }


def _reward(spec: RunSpec) -> str:
    weights = {name: term.weight for name, term in spec.rewards.items()}
    if len(weights) == 1:
        return next(iter(weights))
    return ", ".join(f"{name} x {weight:g}" for name, weight in weights.items())


def _log_ratio(spec: RunSpec) -> str:
    if spec.mode == "bypass" and isinstance(spec.loss, ImageLoss) and spec.loss.own_ratio:
        return spec.loss.own_ratio
    is_centered = spec.config.algorithm.rollout_correction.centered
    setting = spec.given.algorithm.rollout_correction.centered
    why = f"its rollout records {'its' if is_centered else 'no'} means"
    if setting is not None:
        why = f"centered={setting}".lower()
    elif spec.is_text:
        why = "text has no means"
    return f"{'centered' if is_centered else 'plain'} ({why})"


def _loss(spec: RunSpec) -> str:
    if spec.config.algorithm.rollout_correction.loss_type == "reinforce":
        return "reinforce, no clip"
    section = _section(spec)
    words = [section.loss_mode]
    if spec.forward_loss is not None:
        words += [f"{name} {value}" for name, value in section.options.items() if name != "times"]
        words.append(f"{spec.trained_steps} noise levels of a sample")
    for name in option_names(type(spec.loss)):
        match name:
            case "kl_threshold":
                words.append(f"KL of a step below {section.kl_threshold}")
            case "clip_ratio":
                words.append(f"clip {section.clip_ratio}{_replaced(spec)}")
            case "clip_ratio_low":
                words.append(f"clip {section.clip_ratio_low} below")
            case "clip_ratio_high":
                words.append(f"{section.clip_ratio_high} above")
    return ", ".join(words)


def _replaced(spec: RunSpec) -> str:
    """Returns which clip the user gave, if a number had to take its place."""
    clip = spec.given.actor.diffusion_loss.clip_ratio
    if clip == spec.config.actor.diffusion_loss.clip_ratio:
        return ""
    return (
        f" in place of {clip}, which follows the mismatch of new samples in bypass mode, if the "
        "loss says what it clips"
    )


def _section(spec: RunSpec) -> Any:
    """Returns the section of the loss; which keys it has, `option_names` says."""
    actor = spec.config.actor
    return actor.token_loss if spec.is_text else actor.diffusion_loss


def _rejection(spec: RunSpec) -> str:
    correction = spec.config.algorithm.rollout_correction
    criteria = f"{_joined(correction.rollout_rs)} {_joined(correction.rollout_rs_threshold)}"
    veto = correction.rollout_token_veto_threshold
    words = [criteria.strip()] if correction.rollout_rs else []
    return "; ".join(words if veto is None else [*words, f"veto {veto}"])


def _joined(value: object) -> str:
    items = value if isinstance(value, list) else str(value or "").split(",")
    return ", ".join(str(item).strip() for item in items)


def _weights(spec: RunSpec) -> str:
    correction = spec.config.algorithm.rollout_correction
    if not correction.rollout_is:
        return ""
    choice = " ".join(filter(None, (correction.rollout_is, correction.rollout_is_mode)))
    return f"{choice}, bound {correction.rollout_is_threshold}"


def _precision(spec: RunSpec) -> str:
    config = spec.config
    rollout = config.rollout
    sampled = (
        f"{rollout.dtype} with {rollout.quantization}" if rollout.quantization else rollout.dtype
    )
    trained = config.model.dtype
    if config.trainer.mixed_precision != "no":
        trained += f" with {config.trainer.mixed_precision}"
    if config.model.quantization:
        trained += f" with {config.model.quantization} weights"
    return f"rollout {sampled}, training {trained}"
