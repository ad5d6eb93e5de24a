"""Reads what the settings of peft beside a LoRA's tensors mean: the strength of each module.

Such files come from anywhere, so each setting is read here, or has no effect on what the tensors
add, or has to be peft's default.
"""

import math
from collections.abc import Mapping
from typing import Any

from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key

from flowgrpo_rc.reading import blaming

_DEFAULTS = LoraConfig().to_dict()
_STRENGTH = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")
_MODULES = ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern")
_NO_EFFECT = (
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision"),
    *("eva_config", "fan_in_fan_out", "lora_dropout", "runtime_config", "task_type"),
)
# Ways to begin that leave the base model as it is. All others belong to changed weights.
_SAME_BASE = (True, False, "gaussian", "eva", "mica", "orthogonal")


def strengths(stated: Mapping[str, object], ranks: Mapping[str, int]) -> dict[str, float]:
    """Computes the strength of each module as peft does.

        alpha / r,  or alpha / sqrt(r) with use_rslora

    Args:
      stated: the settings, as `LoraConfig` names them; what is not there is peft's default.
      ranks: the inner dimension of each module's tensors, by its name in the network.

    Raises:
      ValueError: a setting is not known, or contradicts the tensors.
    """
    for name, value in stated.items():
        default = _DEFAULTS.get(name)
        # A setting that peft did not have when the file was written, or has dropped, is off.
        is_off = value in (None, False, [], {}) and default in (None, False, [], {})
        known = name in (*_STRENGTH, *_MODULES, *_NO_EFFECT) or value == default or is_off
        if name == "init_lora_weights":
            known = value in _SAME_BASE
        if not known:
            raise ValueError(
                f"it sets {name}={value!r}; only a plain LoRA of an unchanged base model can be "
                f"trained further (peft's default: {default!r})"
            )
    settings: dict[str, Any] = _DEFAULTS | dict(stated)
    left_out = []
    with blaming(", ".join(_MODULES)):
        if settings["target_modules"] not in (None, "all-linear"):
            chosen = LoraConfig(**{name: settings[name] for name in _MODULES})
            left_out = [name for name in ranks if not check_target_module_exists(chosen, name)]
    for module in left_out:
        raise ValueError(f"it holds tensors of {module}, which {', '.join(_MODULES)} leave out")
    scales = {}
    for module, rank in ranks.items():
        given_rank = _of_module(settings, "r", "rank_pattern", module)
        alpha = _of_module(settings, "lora_alpha", "alpha_pattern", module)
        is_number = isinstance(alpha, int | float) and math.isfinite(alpha)
        if given_rank != rank or not is_number:
            raise ValueError(
                f"r and rank_pattern give {module} rank {given_rank}, its tensors {rank}; "
                f"lora_alpha and alpha_pattern give it alpha {alpha}"
            )
        scales[module] = alpha / (math.sqrt(rank) if settings["use_rslora"] else rank)
    return scales


def _of_module(settings: Mapping[str, Any], name: str, pattern: str, module: str) -> Any:
    """Returns a module's own value by the first pattern that fits it, or that of all modules."""
    patterns = settings[pattern]
    with blaming(f"{pattern}={patterns!r}"):
        return patterns.get(get_pattern_key(patterns.keys(), module), settings[name])
