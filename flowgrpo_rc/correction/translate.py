"""Settings as verl (older and newer), verl-omni or slime write them -> `RolloutCorrectionConfig`, and what changed.

A key that is set twice with different values is an error that names both. Nothing is dropped without a note.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any, NamedTuple

from flowgrpo_rc.correction.bands import KEY, OLDER_NAMES
from flowgrpo_rc.correction.config import RolloutCorrectionConfig
from flowgrpo_rc.correction.presets import PRESETS

OWN_KEYS = tuple(f.name for f in dataclasses.fields(RolloutCorrectionConfig))
OLDER_KEYS = ("bypass_old_logprob_for_rollout", "use_pure_rollout_correction", "use_policy_gradient")
SLIME_SWITCHES = ("use_tis", "use_rollout_correction", "use_rollout_logprobs", "get_mismatch_metrics", "use_rs")
SLIME_TIS = ("level", "mode", "lower_bound", "upper_bound", "batch_normalize")
SLIME_KEYS = (
    *SLIME_SWITCHES,
    *(f"{prefix}_{name}" for prefix in ("tis", "mis") for name in SLIME_TIS),
    *("rs_level", "rs_lower_bound", "rs_upper_bound", "rs_veto_threshold", "mis_veto_threshold"),
    "custom_tis_function_path",
)
# Read by the configuration, which may open files; see `flowgrpo_rc.compat`.
FILE_KEY = "custom_config_path"
KNOWN_KEYS = (*OWN_KEYS, "preset", *OLDER_KEYS, *SLIME_KEYS, FILE_KEY)
# A preset is named for these, so that it cannot be refined by others.
_FIXED_BY_PRESET = ("bypass_mode", "loss_type")


class Translation(NamedTuple):
    """settings: keyword arguments of `RolloutCorrectionConfig`; notes: a line for every key with another name here."""

    settings: dict[str, Any]
    notes: tuple[str, ...]


def translate(settings: Mapping[str, Any]) -> Translation:
    """Settings of this project from those of any of the documents; `RolloutCorrectionConfig.validate` judges them.

    Raises ValueError for an unknown key (naming the nearest), an unknown preset and a contradiction (naming both keys).
    """
    given = {str(key): value for key, value in settings.items()}
    for key in given:
        if key not in KNOWN_KEYS:
            near = difflib.get_close_matches(key, KNOWN_KEYS, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise ValueError(f"{KEY}.{key}: unknown key{hint}; its keys are {', '.join(OWN_KEYS)} and preset")
    found = _Settings()
    for key in OWN_KEYS:
        if key in given:
            found.put(key, given[key], key)
    _older(given, found)
    _slime({key: value for key, value in given.items() if key in SLIME_KEYS and value is not None}, found)
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
                f"{KEY}.{source} means {key}={value!r}, but {KEY}.{self._source[key]} says {key}="
                f"{self.values[key]!r}: drop one of them"
            )
        self.values[key], self._source[key] = value, self._source.get(key, source)
        if source != key:
            self.note(f"{source} -> {key}={value}")

    def note(self, text: str) -> None:
        self.notes.append(text)


def _preset(name: str | None, found: _Settings) -> None:
    """The preset's settings below what was given; its mode and loss cannot be given differently."""
    if name is None:
        return
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise ValueError(f"{KEY}.preset={name!r}{hint}: there are {', '.join(PRESETS)}")
    chosen = vars(getattr(RolloutCorrectionConfig, name)())
    for key in _FIXED_BY_PRESET:
        if found.values.get(key, chosen[key]) != chosen[key]:
            raise ValueError(
                f"{KEY}.preset={name} has {key}={chosen[key]}, but {KEY}.{key}={found.values[key]} is given: choose "
                "another preset, or drop one of them"
            )
    changed = {key: value for key, value in chosen.items() if value != vars(RolloutCorrectionConfig())[key]}
    found.values = changed | found.values
    listed = ", ".join(f"{key}={value}" for key, value in changed.items()) or "metrics only"
    found.note(f"preset={name} -> {listed}")


def _older(given: Mapping[str, Any], found: _Settings) -> None:
    """verl's keys before `bypass_mode` and `loss_type`, and its names of rejection levels."""
    if given.get("bypass_old_logprob_for_rollout") is not None:
        found.put("bypass_mode", bool(given["bypass_old_logprob_for_rollout"]), "bypass_old_logprob_for_rollout")
    for key in ("use_pure_rollout_correction", "use_policy_gradient"):
        if given.get(key) is not None:
            found.put("loss_type", "reinforce" if given[key] else "ppo_clip", key)
    level = given.get("rollout_rs")
    if isinstance(level, str) and level in OLDER_NAMES:
        found.note(f"rollout_rs={level} -> {OLDER_NAMES[level]}")


def _slime(given: Mapping[str, Any], found: _Settings) -> None:
    """slime's flags. What its switches leave unused is said and left out, as slime does."""
    if "use_rollout_logprobs" in given:
        found.put("bypass_mode", bool(given["use_rollout_logprobs"]), "use_rollout_logprobs")
    if given.get("get_mismatch_metrics"):
        found.note("get_mismatch_metrics: the metrics are always reported, and change nothing in the loss")
    if "custom_tis_function_path" in given:
        module, _, function = str(given["custom_tis_function_path"]).replace(":", ".").rpartition(".")
        found.put("custom_correction", f"{module}:{function}", "custom_tis_function_path")
    for key in ("rs_veto_threshold", "mis_veto_threshold"):
        if key in given:
            found.put("rollout_token_veto_threshold", float(given[key]), key)
    tis = _tis(given)
    _slime_weights(_same(given, "use_tis", "use_rollout_correction"), tis, found)
    rejection = {key.removeprefix("rs_"): value for key, value in given.items() if key in _RS_KEYS}
    if not given.get("use_rs"):
        _unused(rejection, "rs", "use_rs", found)
        return
    level = rejection.get("level", "token")
    found.put("rollout_rs", OLDER_NAMES.get(level, level), "use_rs")
    upper = rejection.get("upper_bound", tis.get("upper_bound", 2.0))
    found.put("rollout_rs_threshold", upper, "rs_upper_bound")
    lower = rejection.get("lower_bound", tis.get("lower_bound"))
    if lower is not None:
        found.put("rollout_rs_threshold_lower", lower, "rs_lower_bound")


_RS_KEYS = ("rs_level", "rs_lower_bound", "rs_upper_bound")


def _slime_weights(enabled: Any, tis: Mapping[str, Any], found: _Settings) -> None:
    if not enabled:
        if enabled is not None:
            found.put("rollout_is", None, "use_tis")
        _unused(tis, "tis", "use_tis", found)
        return
    found.put("rollout_is", tis.get("level", "token"), "use_tis")
    mode, upper = tis.get("mode", "truncate"), tis.get("upper_bound", 2.0)
    if "mode" in tis:
        found.put("rollout_is_mode", mode, "tis_mode")
    if mode == "truncate":
        _unused({key: value for key, value in tis.items() if key == "lower_bound"}, "tis", "tis_mode", found)
        found.put("rollout_is_threshold", upper, "tis_upper_bound")
    else:
        found.put("rollout_is_threshold", f"{tis.get('lower_bound', 1 / upper)}_{upper}", "tis_upper_bound")
    if "batch_normalize" in tis:
        found.put("rollout_is_batch_normalize", bool(tis["batch_normalize"]), "tis_batch_normalize")


def _tis(given: Mapping[str, Any]) -> dict[str, Any]:
    """The weight settings, which slime spells tis_* and mis_*."""
    found = {name: _same(given, f"tis_{name}", f"mis_{name}") for name in SLIME_TIS}
    return {name: value for name, value in found.items() if value is not None}


def _same(given: Mapping[str, Any], one: str, other: str) -> Any:
    """The value of a setting with two names; ValueError if they differ, None if neither is given."""
    if one in given and other in given and given[one] != given[other]:
        raise ValueError(f"{KEY}.{one}={given[one]!r} and {KEY}.{other}={given[other]!r} contradict: drop one of them")
    return given.get(one, given.get(other))


def _unused(settings: Mapping[str, Any], prefix: str, switch: str, found: _Settings) -> None:
    for key, value in settings.items():
        found.note(f"{prefix}_{key}={value} is not used, because of {switch}")
