"""Translates settings of verl (older and newer), verl-omni or slime into ours.

A key that is set twice with different values is an error that names both. Nothing is dropped
without a note.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any, NamedTuple

from flowgrpo_rc.correction.config import RolloutCorrectionConfig
from flowgrpo_rc.correction.presets import PRESETS
from flowgrpo_rc.correction.thresholds import KEY, OLDER_NAMES

OWN_KEYS = tuple(f.name for f in dataclasses.fields(RolloutCorrectionConfig))
OLDER_KEYS = (
    "bypass_old_logprob_for_rollout",
    "use_pure_rollout_correction",
    "use_policy_gradient",
)
# These switch a correction on.
SLIME_CORRECTIONS = ("use_tis", "use_rollout_correction", "use_rs")
SLIME_SWITCHES = (*SLIME_CORRECTIONS, "use_rollout_logprobs", "get_mismatch_metrics")
SLIME_TIS = ("level", "mode", "lower_bound", "upper_bound", "batch_normalize")
SLIME_REJECTION = ("level", "lower_bound", "upper_bound")
SLIME_KEYS = (
    *SLIME_SWITCHES,
    *(f"{prefix}_{name}" for prefix in ("tis", "mis") for name in SLIME_TIS),
    *(f"rs_{name}" for name in SLIME_REJECTION),
    "rs_veto_threshold",
    "mis_veto_threshold",
    "custom_tis_function_path",
)
# Two spellings of one setting.
SLIME_PAIRS = (
    ("use_tis", "use_rollout_correction"),
    ("rs_veto_threshold", "mis_veto_threshold"),
    *((f"tis_{name}", f"mis_{name}") for name in SLIME_TIS),
)
# Read by the configuration, which may open files; see `flowgrpo_rc.config.compat`.
FILE_KEY = "custom_config_path"
KNOWN_KEYS = (*OWN_KEYS, "preset", *OLDER_KEYS, *SLIME_KEYS, FILE_KEY)
# A preset is named for these, so that it cannot be refined by others.
_FIXED_BY_PRESET = ("bypass_mode", "loss_type")


class Translation(NamedTuple):
    """Translated settings.

    Attributes:
      settings: keyword arguments of `RolloutCorrectionConfig`.
      notes: a line for every key that has another name here, or is not used.
    """

    settings: dict[str, Any]
    notes: tuple[str, ...]


def translate(settings: Mapping[str, Any]) -> Translation:
    """Translates settings in the words of any of the documents.

    Args:
      settings: key -> value, as the user gives them.

    Returns:
      Settings of this project, which `RolloutCorrectionConfig.validate` has still to check, and
      notes.

    Raises:
      ValueError: for an unknown key (naming the nearest), an unknown preset and a contradiction
        (naming both keys).
    """
    given = {str(key): value for key, value in settings.items()}
    for key in given:
        if key not in KNOWN_KEYS:
            near = difflib.get_close_matches(key, KNOWN_KEYS, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise ValueError(
                f"{KEY}.{key}: unknown key{hint}; its keys are {', '.join(OWN_KEYS)} and preset"
            )
    found = _Settings()
    for key in OWN_KEYS:
        if key in given:
            found.put(key, given[key], key)
    _older(given, found)
    _slime(
        {key: value for key, value in given.items() if key in SLIME_KEYS and value is not None},
        found,
    )
    _preset(given.get("preset"), found)
    return Translation(found.values, tuple(found.notes))


class _Settings:
    """Our settings so far, and which key of the user each came from."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.notes: list[str] = []
        self._source: dict[str, str] = {}

    def put(self, key: str, value: Any, source: str) -> None:
        if key in self.values and self.values[key] != value:
            raise ValueError(
                f"{KEY}.{source} means {key}={value!r}, but {KEY}.{self._source[key]} says "
                f"{key}={self.values[key]!r}: drop one of them"
            )
        self.values[key] = value
        self._source.setdefault(key, source)
        if source != key:
            self.note(f"{source} -> {key}={value}")

    def note(self, text: str) -> None:
        self.notes.append(text)


def without_dependents(settings: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Drops the settings that depend on a switch which other settings turn off.

    Args:
      settings: settings of this project.
      over: settings that take precedence, where null turns a switch off.

    Returns:
      The settings that are left.
    """
    gone: set[str] = set()
    for switch, names in _DEPENDENTS.items():
        if over.get(switch, 0) is None:
            gone.update(names)
    return {key: value for key, value in settings.items() if key not in gone}


_DEPENDENTS = {
    "rollout_is": ("rollout_is_mode", "rollout_is_batch_normalize"),
    "rollout_rs": ("rollout_rs_threshold", "rollout_rs_threshold_lower"),
}


def _preset(name: Any, found: _Settings) -> None:
    """Puts the preset's settings below those that are given; its mode and loss are fixed."""
    if name is None:
        return
    if name not in PRESETS:
        near = difflib.get_close_matches(str(name), PRESETS, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise ValueError(f"{KEY}.preset={name!r}{hint}: there are {', '.join(PRESETS)}")
    chosen = vars(getattr(RolloutCorrectionConfig, name)())
    for key in _FIXED_BY_PRESET:
        if found.values.get(key, chosen[key]) != chosen[key]:
            raise ValueError(
                f"{KEY}.preset={name} has {key}={chosen[key]}, but {KEY}.{key}={found.values[key]} "
                "is given: choose another preset, or drop one of them"
            )
    changed = {
        key: value for key, value in chosen.items() if value != vars(RolloutCorrectionConfig())[key]
    }
    found.values = without_dependents(changed, found.values) | found.values
    listed = ", ".join(f"{key}={value}" for key, value in changed.items()) or "metrics only"
    found.note(f"preset={name} -> {listed}")


def _older(given: Mapping[str, Any], found: _Settings) -> None:
    """Puts verl's keys before `bypass_mode` and `loss_type`, and its names of rejection levels."""
    key = "bypass_old_logprob_for_rollout"
    if given.get(key) is not None:
        found.put("bypass_mode", _flag(given[key], key), key)
    for key in ("use_pure_rollout_correction", "use_policy_gradient"):
        if given.get(key) is not None:
            found.put("loss_type", "reinforce" if _flag(given[key], key) else "ppo_clip", key)
    level = given.get("rollout_rs")
    if isinstance(level, str) and level in OLDER_NAMES:
        found.note(f"rollout_rs={level} -> {OLDER_NAMES[level]}")


def _slime(given: Mapping[str, Any], found: _Settings) -> None:
    """Puts slime's flags. What its switches leave unused is left out with a note, as slime does."""
    if "use_rollout_logprobs" in given:
        key = "use_rollout_logprobs"
        found.put("bypass_mode", _flag(given[key], key), key)
    if "get_mismatch_metrics" in given:
        found.note(
            "get_mismatch_metrics: the metrics are always reported, and change nothing in the loss"
        )
    if "custom_tis_function_path" in given:
        path = str(given["custom_tis_function_path"]).replace(":", ".")
        module, _, function = path.rpartition(".")
        found.put("custom_correction", f"{module}:{function}", "custom_tis_function_path")
    for key in ("rs_veto_threshold", "mis_veto_threshold"):
        if key in given:
            found.put("rollout_token_veto_threshold", _number(given[key], key), key)
    tis = {name: _same(given, f"tis_{name}", f"mis_{name}") for name in SLIME_TIS}
    rejection = {name: _Given(f"rs_{name}", given.get(f"rs_{name}")) for name in SLIME_REJECTION}
    weigh = _same(given, "use_tis", "use_rollout_correction")
    reject = _Given("use_rs", given.get("use_rs"))
    used: set[str] = set()
    if _on(weigh):
        used |= _slime_weights(weigh.key, tis, found)
    else:
        _off(weigh, _NO_WEIGHTS, found)
    if _on(reject):
        used |= _slime_rejection(reject.key, rejection, tis, found)
    else:
        _off(reject, _NO_REJECTION, found)
    for one in (*tis.values(), *rejection.values()):
        if one.value is None or one.key in used:
            continue
        switch = reject if one.key.startswith("rs_") else weigh
        why = "tis_mode=truncate has no lower bound" if _on(switch) else f"{switch.key} is not on"
        found.note(f"{one.key}={one.value} is not used: {why}")


class _Given(NamedTuple):
    """A key of the user and its value, None where it is not given."""

    key: str
    value: Any

    def source(self, switch: str) -> str:
        """Who says so: the key, or the switch that is on where the key is not given."""
        return switch if self.value is None else self.key


_NO_WEIGHTS = {"rollout_is": None, "rollout_is_mode": None, "rollout_is_batch_normalize": False}
_NO_REJECTION = {
    "rollout_rs": None,
    "rollout_rs_threshold": None,
    "rollout_rs_threshold_lower": None,
}


def _slime_weights(switch: str, tis: Mapping[str, _Given], found: _Settings) -> set[str]:
    """Puts slime's settings of the weights. Returns the keys that took part."""
    level, mode = tis["level"], tis["mode"]
    lower, upper = tis["lower_bound"], tis["upper_bound"]
    normalize = tis["batch_normalize"]
    used = {level.key, mode.key, upper.key, normalize.key}
    found.put("rollout_is", level.value or "token", level.source(switch))
    if mode.value is not None:
        found.put("rollout_is_mode", mode.value, mode.key)
    highest = 2.0 if upper.value is None else _number(upper.value, upper.key)
    if mode.value in (None, "truncate"):
        found.put("rollout_is_threshold", highest, upper.source(switch))
    else:
        used.add(lower.key)
        lowest = _number(1 / highest if lower.value is None else lower.value, lower.key)
        pair = f"{lowest}_{highest}"
        found.put("rollout_is_threshold", pair, upper.source(lower.source(switch)))
        if lower.value is not None:
            found.note(f"{lower.key} -> the lower bound in rollout_is_threshold")
    if normalize.value is not None:
        flag = _flag(normalize.value, normalize.key)
        found.put("rollout_is_batch_normalize", flag, normalize.key)
    return used


def _slime_rejection(
    switch: str, rejection: Mapping[str, _Given], tis: Mapping[str, _Given], found: _Settings
) -> set[str]:
    """Puts slime's settings of the rejection. Returns the keys that took part.

    Bounds that are not given fall back to those of the weights.
    """
    level = rejection["level"]
    upper = rejection["upper_bound"]
    if upper.value is None:
        upper = tis["upper_bound"]
    lower = rejection["lower_bound"]
    if lower.value is None:
        lower = tis["lower_bound"]
    name = level.value or "token"
    found.put("rollout_rs", OLDER_NAMES.get(name, name), level.source(switch))
    bound = 2.0 if upper.value is None else _number(upper.value, upper.key)
    found.put("rollout_rs_threshold", bound, upper.source(switch))
    if lower.value is not None:
        found.put("rollout_rs_threshold_lower", _number(lower.value, lower.key), lower.key)
    return {level.key, upper.key, lower.key}


def _on(switch: _Given) -> bool:
    return switch.value is not None and _flag(switch.value, switch.key)


def _off(switch: _Given, settings: Mapping[str, Any], found: _Settings) -> None:
    """Switches off if the switch is given, as false; one that is not given changes nothing."""
    if switch.value is not None:
        for key, value in settings.items():
            found.put(key, value, switch.key)


def _same(given: Mapping[str, Any], one: str, other: str) -> _Given:
    """Reads a setting with two names. ValueError if they are given with different values."""
    if one in given and other in given and given[one] != given[other]:
        raise ValueError(
            f"{KEY}.{one}={given[one]!r} and {KEY}.{other}={given[other]!r} contradict: drop one "
            "of them"
        )
    return _Given(other, given[other]) if other in given else _Given(one, given.get(one))


def _flag(value: Any, key: str) -> bool:
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if not isinstance(value, bool):
        raise ValueError(f"{KEY}.{key}={value!r}: give true or false")
    return value


def _number(value: Any, key: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{KEY}.{key}={value!r}: give a number") from None
