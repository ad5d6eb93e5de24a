"""Settings as verl (older and newer), verl-omni or slime write them -> `RolloutCorrectionConfig`,
and what changed.

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
SLIME_SWITCHES = (
    "use_tis",
    "use_rollout_correction",
    "use_rollout_logprobs",
    "get_mismatch_metrics",
    "use_rs",
)
SLIME_TIS = ("level", "mode", "lower_bound", "upper_bound", "batch_normalize")
SLIME_KEYS = (
    *SLIME_SWITCHES,
    *(f"{prefix}_{name}" for prefix in ("tis", "mis") for name in SLIME_TIS),
    *("rs_level", "rs_lower_bound", "rs_upper_bound", "rs_veto_threshold", "mis_veto_threshold"),
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
    """settings: keyword arguments of `RolloutCorrectionConfig`; notes: a line for every key with
    another name here.
    """

    settings: dict[str, Any]
    notes: tuple[str, ...]


def translate(settings: Mapping[str, Any]) -> Translation:
    """Settings of this project from those of any of the documents;
    `RolloutCorrectionConfig.validate` judges them.

    Raises ValueError for an unknown key (naming the nearest), an unknown preset and a contradiction
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
        self.values[key], self._source[key] = value, self._source.get(key, source)
        if source != key:
            self.note(f"{source} -> {key}={value}")

    def note(self, text: str) -> None:
        self.notes.append(text)


def without_dependents(settings: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`settings` less what depends on a switch that `over` sets to null."""
    gone = {
        name
        for switch, names in _DEPENDENTS.items()
        if over.get(switch, 0) is None
        for name in names
    }
    return {key: value for key, value in settings.items() if key not in gone}


_DEPENDENTS = {
    "rollout_is": ("rollout_is_mode", "rollout_is_batch_normalize"),
    "rollout_rs": ("rollout_rs_threshold", "rollout_rs_threshold_lower"),
}


def _preset(name: Any, found: _Settings) -> None:
    """The preset's settings below what was given; its mode and loss cannot be given differently."""
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
    """verl's keys before `bypass_mode` and `loss_type`, and its names of rejection levels."""
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
    """slime's flags. What its switches leave unused is said and left out, as slime does."""
    if "use_rollout_logprobs" in given:
        key = "use_rollout_logprobs"
        found.put("bypass_mode", _flag(given[key], key), key)
    if "get_mismatch_metrics" in given:
        found.note(
            "get_mismatch_metrics: the metrics are always reported, and change nothing in the loss"
        )
    if "custom_tis_function_path" in given:
        module, _, function = (
            str(given["custom_tis_function_path"]).replace(":", ".").rpartition(".")
        )
        found.put("custom_correction", f"{module}:{function}", "custom_tis_function_path")
    for key in ("rs_veto_threshold", "mis_veto_threshold"):
        if key in given:
            found.put("rollout_token_veto_threshold", _number(given[key], key), key)
    tis = {name: _same(given, f"tis_{name}", f"mis_{name}") for name in SLIME_TIS}
    names = ("level", "lower_bound", "upper_bound")
    rejection = {name: _Given(f"rs_{name}", given.get(f"rs_{name}")) for name in names}
    weigh, reject = (
        _same(given, "use_tis", "use_rollout_correction"),
        _Given("use_rs", given.get("use_rs")),
    )
    used = _slime_weights(weigh.key, tis, found) if _on(weigh) else _off(weigh, _NO_WEIGHTS, found)
    used |= (
        _slime_rejection(reject.key, rejection, tis, found)
        if _on(reject)
        else _off(reject, _NO_REJECTION, found)
    )
    for one in (*tis.values(), *rejection.values()):
        if one.value is not None and one.key not in used:
            switch = reject if one.key.startswith("rs_") else weigh
            why = (
                "tis_mode=truncate has no lower bound" if _on(switch) else f"{switch.key} is not on"
            )
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
    """Put the weight settings of slime; returns the keys that took part."""
    used = [tis["level"], tis["mode"], tis["upper_bound"], tis["batch_normalize"]]
    found.put("rollout_is", tis["level"].value or "token", tis["level"].source(switch))
    if tis["mode"].value is not None:
        found.put("rollout_is_mode", tis["mode"].value, tis["mode"].key)
    upper = (
        2.0
        if tis["upper_bound"].value is None
        else _number(tis["upper_bound"].value, tis["upper_bound"].key)
    )
    if tis["mode"].value in (None, "truncate"):
        found.put("rollout_is_threshold", upper, tis["upper_bound"].source(switch))
    else:
        used.append(tis["lower_bound"])
        lower = 1 / upper if tis["lower_bound"].value is None else tis["lower_bound"].value
        pair = f"{_number(lower, tis['lower_bound'].key)}_{upper}"
        found.put(
            "rollout_is_threshold",
            pair,
            tis["upper_bound"].source(tis["lower_bound"].source(switch)),
        )
        if tis["lower_bound"].value is not None:
            found.note(f"{tis['lower_bound'].key} -> the lower bound in rollout_is_threshold")
    if tis["batch_normalize"].value is not None:
        normalize = tis["batch_normalize"]
        found.put(
            "rollout_is_batch_normalize", _flag(normalize.value, normalize.key), normalize.key
        )
    return {one.key for one in used}


def _slime_rejection(
    switch: str, rejection: Mapping[str, _Given], tis: Mapping[str, _Given], found: _Settings
) -> set[str]:
    """Put the rejection settings of slime, whose bounds fall back to those of the weights; returns
    the keys used.
    """
    level = rejection["level"].value or "token"
    upper = (
        rejection["upper_bound"]
        if rejection["upper_bound"].value is not None
        else tis["upper_bound"]
    )
    lower = (
        rejection["lower_bound"]
        if rejection["lower_bound"].value is not None
        else tis["lower_bound"]
    )
    found.put("rollout_rs", OLDER_NAMES.get(level, level), rejection["level"].source(switch))
    bound = 2.0 if upper.value is None else _number(upper.value, upper.key)
    found.put("rollout_rs_threshold", bound, upper.source(switch))
    if lower.value is not None:
        found.put("rollout_rs_threshold_lower", _number(lower.value, lower.key), lower.key)
    return {rejection["level"].key, upper.key, lower.key}


def _on(switch: _Given) -> bool:
    return switch.value is not None and _flag(switch.value, switch.key)


def _off(switch: _Given, settings: Mapping[str, Any], found: _Settings) -> set[str]:
    """A switch that is given as false switches off; one that is not given leaves the rest of the
    settings alone.
    """
    if switch.value is not None:
        for key, value in settings.items():
            found.put(key, value, switch.key)
    return set()


def _same(given: Mapping[str, Any], one: str, other: str) -> _Given:
    """A setting with two names; ValueError if they are given with different values."""
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
