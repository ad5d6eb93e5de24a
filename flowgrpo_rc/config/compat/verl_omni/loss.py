"""verl-omni's keys of the loss of images."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from flowgrpo_rc.config.compat.rules import (
    AS_HERE,
    Outcome,
    Rule,
    Setting,
    Written,
    each,
    reported,
    same,
)
from flowgrpo_rc.config.compat.verl_omni.keys import ACTOR, MODEL, PREFIX

_LOSS = f"{ACTOR}.diffusion_loss"
_HERE = "actor.diffusion_loss"
_OLDER = f"{ACTOR}.policy_loss.loss_mode"
# The loss of each algorithm; the samplers of mix_grpo and dance_grpo are settings of the rollout.
ALGORITHMS = {
    "flow_grpo": "flow_grpo",
    "grpo_guard": "grpo_guard",
    "flow_dppo": "flow_dppo",
    "mix_grpo": "flow_grpo",
}
_ALIASES = {"dance_grpo": "flow_grpo"}
# The default here, which a loss without a clip demands.
_NO_CLIP = 1e-4


def gives_loss(given: Mapping[str, Any]) -> bool:
    """Returns whether a `loss_mode` is given, in either system's words."""
    return any(key in given for key in (f"{_LOSS}.loss_mode", f"{_HERE}.loss_mode", _OLDER))


def loss_outcome(loss: str) -> Outcome:
    """Returns the settings of a loss of verl-omni.

    Its Flow-DPPO neither clips a ratio nor advantages.
    """
    settings: dict[str, Any] = {f"{_HERE}.loss_mode": loss}
    if loss != "flow_dppo":
        return Outcome(settings)
    settings |= {f"{_HERE}.clip_ratio": _NO_CLIP, f"{_HERE}.adv_clip_max": math.inf}
    return Outcome(settings, "verl-omni does not clip the advantages of flow_dppo")


def _is_dppo(given: Mapping[str, Any]) -> bool:
    for key in (f"{_HERE}.loss_mode", f"{_LOSS}.loss_mode", _OLDER, f"{MODEL}.algorithm"):
        if key in given:
            return bool(given[key] == "flow_dppo")
    return False


def _loss_mode(setting: Setting, given: Mapping[str, Any]) -> Outcome:
    return loss_outcome(_ALIASES.get(setting.value, setting.value))


def _clip(setting: Setting, given: Mapping[str, Any]) -> Outcome:
    """A bound of the PPO losses, which Flow-DPPO does not have."""
    if _is_dppo(given):
        return Outcome(why="without effect there with flow_dppo")
    return Outcome({setting.key.removeprefix(PREFIX): Written(setting.text)})


def _kl_threshold(setting: Setting, given: Mapping[str, Any]) -> Outcome:
    if _is_dppo(given):
        return Outcome({f"{_HERE}.kl_threshold": Written(setting.text)})
    return Outcome(why="belongs to loss_mode=flow_dppo")


def _kl_coefficient(setting: Setting, given: Mapping[str, Any]) -> Outcome:
    """The key says whether the variance of a step holds its dt, as it always does here."""
    if _is_dppo(given) and not same(setting.value, True):
        return Outcome(
            why="the KL here is that of the step, dt included: set it to true", stops=True
        )
    return Outcome(why=AS_HERE if _is_dppo(given) else "belongs to loss_mode=flow_dppo")


LOSS_RULES: dict[str, Rule] = {
    f"{_LOSS}.loss_mode": _loss_mode,
    _OLDER: _loss_mode,
    f"{_LOSS}.clip_ratio": _clip,
    f"{_LOSS}.adv_clip_max": _clip,
    **each(
        _LOSS,
        "mix_beta ref_kl_coef adaptive_weight_min dpo_beta mse_weight ratio_norm",
        reported("belongs to a loss that this project has not"),
    ),
    f"{_LOSS}.kl_mask_threshold": _kl_threshold,
    f"{_LOSS}.add_kl_coefficient": _kl_coefficient,
}
