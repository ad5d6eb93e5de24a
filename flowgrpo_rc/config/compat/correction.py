"""Builds the rollout correction from layers of settings in any document's words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from flowgrpo_rc.correction.config import RolloutCorrectionConfig
from flowgrpo_rc.correction.thresholds import KEY
from flowgrpo_rc.correction.translate import (
    FILE_KEY,
    SLIME_CORRECTIONS,
    SLIME_KEYS,
    SLIME_PAIRS,
    translate,
    without_dependents,
)

Layer = Mapping[str, Any]
_WHY_DECOUPLED = (
    "in bypass mode with ppo_clip weights would be metrics alone (bypass_mode=true, if that is "
    "meant)"
)


def rollout_correction(layers: Sequence[Layer]) -> tuple[RolloutCorrectionConfig, list[str]]:
    """Builds the rollout correction, and checks it.

    A later layer overrides an earlier one and refines its slime flags; a layer that names a preset
    replaces all earlier ones. A layer that asks for weights without a word on the mode gets
    decoupled mode, the default of the documents, if an earlier one has a mode in which weights are
    metrics alone.

    Args:
      layers: settings of the files and of the command line, in this order.

    Returns:
      The correction, and notes on what was translated.

    Raises:
      ValueError: two keys of one layer contradict each other, or the result cannot work.
    """
    settings: dict[str, Any] = {}
    notes: list[str] = []
    flags: dict[str, Any] = {}
    for layer in layers:
        given, read = _with_file(layer)
        if given.get("preset") is not None:
            settings = {}
            flags = {}
        own = {key: value for key, value in given.items() if key in SLIME_KEYS}
        replaced = {key for pair in SLIME_PAIRS for key in pair if own.keys() & set(pair)}
        flags = {key: value for key, value in flags.items() if key not in replaced} | own
        found = translate(given | flags if own else given)
        notes += [*read, *found.notes]
        asking = _asks_for_weights(settings, found.settings, own)
        settings = without_dependents(settings, found.settings) | found.settings
        if asking and not _says_mode(found.settings) and _weights_are_metrics(settings):
            settings["bypass_mode"] = False
            notes.append(f"{asking} -> bypass_mode=False; {_WHY_DECOUPLED}")
    config = RolloutCorrectionConfig(**settings)
    try:
        config.validate()
    except ValueError as error:
        raise ValueError(
            f"{error} (translated: {'; '.join(notes)})" if notes else str(error)
        ) from error
    return config, notes


def _asks_for_weights(
    before: Mapping[str, Any], layer: Mapping[str, Any], slime: Mapping[str, Any]
) -> str:
    """Returns the setting of a layer that asks for weights where there were none; "" without any.

    slime's switches always do: its own default for the mode is decoupled.
    """
    switches = [key for key in SLIME_CORRECTIONS if _is_on(slime.get(key))]
    if switches:
        return f"{switches[0]}=true"
    level = layer.get("rollout_is")
    return "" if level is None or before.get("rollout_is") is not None else f"rollout_is={level}"


def _is_on(value: Any) -> bool:
    return str(value).lower() == "true"


def _says_mode(layer: Mapping[str, Any]) -> bool:
    return "bypass_mode" in layer or "loss_type" in layer


def _weights_are_metrics(settings: Mapping[str, Any]) -> bool:
    return bool(settings.get("bypass_mode")) and settings.get("loss_type") in (None, "ppo_clip")


def _with_file(layer: Layer) -> tuple[dict[str, Any], list[str]]:
    """Adds the keys of a slime file (`custom_config_path`) to a layer, and makes a note of them."""
    given = dict(layer)
    path = given.pop(FILE_KEY, None)
    if path is None:
        return given, []
    there = _read_mapping(Path(str(path)).expanduser())
    for key, value in there.items():
        if key in given and given[key] != value:
            raise ValueError(
                f"{KEY}.{key}={given[key]!r} and {KEY}.{FILE_KEY}={path} with {key}={value!r} "
                "contradict: drop one"
            )
    return there | given, [f"{FILE_KEY}={path} -> {', '.join(there)}"]


def _read_mapping(path: Path) -> dict[str, Any]:
    try:
        found = OmegaConf.to_container(OmegaConf.load(path))
    except (OSError, UnicodeDecodeError, YAMLError, OmegaConfBaseException) as error:
        raise ValueError(f"{KEY}.{FILE_KEY}={path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(
            f"{KEY}.{FILE_KEY}={path} must hold a mapping of keys such as use_tis: true"
        )
    return {str(key): value for key, value in found.items()}
