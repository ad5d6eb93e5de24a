"""Builds the rollout correction from layers of settings in the words of verl, verl-omni or slime.

A key that is set twice with different values is an error that names both. Nothing is dropped
without a note.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from flowgrpo_rc.config.setting import foreign, mapping_of
from flowgrpo_rc.correction.config import RolloutCorrectionConfig
from flowgrpo_rc.correction.presets import PRESETS
from flowgrpo_rc.correction.thresholds import KEY, OLDER_NAMES
from flowgrpo_rc.plugins import did_you_mean

Layer = Mapping[str, Any]
OWN_KEYS = tuple(f.name for f in dataclasses.fields(RolloutCorrectionConfig))
# slime's settings of the weights, each in its spellings, and of the rejection. The last of each
# switches the others on.
_TIS = (
    ("tis_level", "mis_level"),
    ("tis_mode", "mis_mode"),
    ("tis_lower_bound", "mis_lower_bound", "tis_clip_low"),
    ("tis_upper_bound", "mis_upper_bound", "tis_clip"),
    ("tis_batch_normalize", "mis_batch_normalize"),
    ("use_tis", "use_rollout_correction"),
)
_RS = ("rs_level", "rs_lower_bound", "rs_upper_bound", "use_rs")
_SWITCHES = (*_TIS[-1], _RS[-1])
_PAIRS = (*_TIS, ("rs_veto_threshold", "mis_veto_threshold"))
SLIME_KEYS = (*(key for pair in _TIS for key in pair), *_RS, *foreign()["slime"])
_FILE_KEY = "custom_config_path"
KNOWN_KEYS = (*OWN_KEYS, "preset", *foreign()["verl"], *SLIME_KEYS, _FILE_KEY)
# A preset is named for these, so that it cannot be refined by others.
_FIXED_BY_PRESET = ("bypass_mode", "loss_type")
# What acts in both modes, and leaves the mode as it is; no document has `auto` thresholds.
_IN_BOTH_MODES = ("rollout_rs", "rollout_token_veto_threshold", "rollout_is")
# What depends on a switch, and goes with it.
_DEPENDENTS = {
    "rollout_is": ("rollout_is_mode", "rollout_is_batch_normalize"),
    "rollout_rs": ("rollout_rs_threshold", "rollout_rs_threshold_lower"),
}


def rollout_correction(layers: Sequence[Layer]) -> tuple[RolloutCorrectionConfig, list[str]]:
    """Builds the rollout correction, checks it, and returns it with notes on what was translated.

    A later layer overrides an earlier one and refines its slime flags; a layer that names a preset
    replaces all earlier ones. A layer that asks for weights without a word on the mode gets
    decoupled mode, the default of the documents, if an earlier one has a mode in which weights are
    metrics alone; one that rejects or only measures keeps that mode, with a note.
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
        replaced = {key for pair in _PAIRS for key in pair if own.keys() & set(pair)}
        flags = {key: value for key, value in flags.items() if key not in replaced} | own
        found = _translated(given | flags if own else given)
        notes += [*read, *found.notes]
        asking = _asks_for_weights(settings, found.values, own)
        settings = _over(settings, found.values)
        says_mode = "bypass_mode" in found.values or "loss_type" in found.values
        metrics = settings.get("bypass_mode") and settings.get("loss_type") in (None, "ppo_clip")
        if says_mode or not metrics:
            continue
        kept = [f"{key}={found.values[key]}" for key in _IN_BOTH_MODES if key in found.values]
        if asking:
            settings["bypass_mode"] = False
            notes.append(
                f"{asking} -> bypass_mode=False; in bypass mode with ppo_clip weights would be "
                "metrics alone (bypass_mode=true, if that is meant)"
            )
        elif kept and "auto" not in str(found.values.get("rollout_rs_threshold")):
            notes.append(
                f"{kept[0]} -> bypass_mode=True stays, as the configuration has it; without a word "
                "on the mode the documents mean bypass_mode=false"
            )
    config = RolloutCorrectionConfig(**settings)
    try:
        config.validate()
    except ValueError as error:
        told = f" (translated: {'; '.join(notes)})" if notes else ""
        raise ValueError(f"{error}{told}") from error
    return config, notes


def _asks_for_weights(before: Layer, layer: Layer, slime: Layer) -> str:
    """Returns the setting of a layer that asks for weights where there were none; "" without any.

    slime's switches always do: its own default for the mode is decoupled.
    """
    for key in _SWITCHES:
        if str(slime.get(key)).lower() == "true":
            return f"{key}=true"
    level = layer.get("rollout_is")
    return "" if level is None or before.get("rollout_is") is not None else f"rollout_is={level}"


def _over(settings: Layer, over: Layer) -> dict[str, Any]:
    """Returns settings with others over them. What depends on a switch that these turn off goes."""
    off = [names for switch, names in _DEPENDENTS.items() if over.get(switch, 0) is None]
    gone = {name for names in off for name in names}
    return {key: value for key, value in settings.items() if key not in gone} | dict(over)


def _with_file(layer: Layer) -> tuple[dict[str, Any], list[str]]:
    """Adds the keys of a slime file (`custom_config_path`) to a layer, and makes a note of them."""
    given = {str(key): value for key, value in layer.items()}
    path = given.pop(_FILE_KEY, None)
    if path is None:
        return given, []
    file = f"{KEY}.{_FILE_KEY}={path}"
    read = mapping_of(Path(str(path)).expanduser(), file)
    for key, value in read.items():
        if key in given and given[key] != value:
            raise ValueError(
                f"{KEY}.{key}={given[key]!r} and {file} with {key}={value!r} contradict: drop one"
            )
    return read | given, [f"{_FILE_KEY}={path} -> {', '.join(read)}"]


class _Settings:
    """Our settings so far, which key of the user each came from, and notes."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.notes: list[str] = []
        self._sources: dict[str, str] = {}

    def put(self, key: str, value: Any, source: str) -> None:
        if key in self.values and self.values[key] != value:
            raise ValueError(
                f"{KEY}.{source} means {key}={value!r}, but {KEY}.{self._sources[key]} says "
                f"{key}={self.values[key]!r}: drop one of them"
            )
        self.values[key] = value
        self._sources.setdefault(key, source)
        if source != key:
            self.notes.append(f"{source} -> {key}={value}")

    def put_off(self, switch: str, source: str) -> None:
        """Puts the defaults of a switch and of what depends on it."""
        default = RolloutCorrectionConfig()
        for key in (switch, *_DEPENDENTS[switch]):
            self.put(key, getattr(default, key), source)


def _translated(given: Layer) -> _Settings:
    """Translates a layer; ValueError for an unknown key or preset, or a contradiction."""
    found = _Settings()
    for key in given:
        if key not in KNOWN_KEYS:
            raise ValueError(
                f"{KEY}.{key}: unknown key{did_you_mean(key, KNOWN_KEYS)}; its keys are "
                f"{', '.join(OWN_KEYS)} and preset"
            )
    for key in OWN_KEYS:
        if key in given:
            found.put(key, given[key], key)
    level = given.get("rollout_rs")
    if isinstance(level, str) and level in OLDER_NAMES:
        found.notes.append(f"rollout_rs={level} -> {OLDER_NAMES[level]}")
    for key, row in {**foreign()["verl"], **foreign()["slime"]}.items():
        if given.get(key) is None:
            continue
        if isinstance(row, str):
            found.notes.append(f"{key}: {row}")
        elif "stop" in row:
            if _flag(given[key], key):
                raise ValueError(f"{KEY}.{key}={given[key]}: {row['stop']}; drop it")
            found.notes.append(f"{key}={given[key]} changes nothing")
        elif str(given[key]).rpartition(".")[2] in row.get("as_here", ()):
            found.notes.append(f"{key}: as here")
        else:
            value = _VALUES[row["value"]](given[key], key)
            found.put(row["to"], row.get("values", {}).get(value, value), key)
    _slime(given, found)
    if given.get("preset") is not None:
        _preset(given["preset"], found)
    return found


def _preset(name: Any, found: _Settings) -> None:
    """Puts the preset's settings below those that are given; its mode and loss are fixed."""
    if name not in PRESETS:
        raise ValueError(
            f"{KEY}.preset={name!r}{did_you_mean(str(name), PRESETS)}: there are "
            f"{', '.join(PRESETS)}"
        )
    chosen = vars(getattr(RolloutCorrectionConfig, name)())
    for key in _FIXED_BY_PRESET:
        if found.values.get(key, chosen[key]) != chosen[key]:
            raise ValueError(
                f"{KEY}.preset={name} has {key}={chosen[key]}, but {KEY}.{key}={found.values[key]} "
                "is given: choose another preset, or drop one of them"
            )
    default = vars(RolloutCorrectionConfig())
    changed = {key: value for key, value in chosen.items() if value != default[key]}
    found.values = _over(changed, found.values)
    listed = ", ".join(f"{key}={value}" for key, value in changed.items()) or "metrics only"
    found.notes.append(f"preset={name} -> {listed}")


class _Given(NamedTuple):
    """A key of the user and its value, None where it is not given."""

    key: str
    value: Any

    def or_else(self, other: "_Given") -> "_Given":
        return other if self.value is None else self

    def is_on(self) -> bool:
        return self.value is not None and _flag(self.value, self.key)

    def number(self, default: float) -> float:
        return default if self.value is None else _number(self.value, self.key)


def _slime(given: Layer, found: _Settings) -> None:
    """Puts what slime's switches turn on. What they leave unused is left out with a note."""
    level, mode, lower, upper, normalize, weigh = (_either(given, *pair) for pair in _TIS)
    rs_level, rs_lower, rs_upper, reject = (_Given(key, given.get(key)) for key in _RS)
    used: list[_Given] = []
    if weigh.is_on():
        if mode.value is None and lower.key == "tis_clip_low" and lower.number(0) > 0:
            mode = lower._replace(value="clip")
        used += [level, mode, upper, normalize]
        found.put("rollout_is", level.value or "token", level.or_else(weigh).key)
        if mode.value is not None:
            found.put("rollout_is_mode", mode.value, mode.key)
        highest = upper.number(2.0)
        if mode.value in (None, "truncate"):
            found.put("rollout_is_threshold", highest, upper.or_else(weigh).key)
        else:
            used.append(lower)
            lowest = lower.number(1 / highest if highest else 0.0)
            source = upper.or_else(lower).or_else(weigh)
            found.put("rollout_is_threshold", f"{lowest}_{highest}", source.key)
            if lower.value is not None:
                found.notes.append(f"{lower.key} -> the lower bound in rollout_is_threshold")
        if normalize.value is not None:
            found.put("rollout_is_batch_normalize", normalize.is_on(), normalize.key)
    elif weigh.value is not None:
        found.put_off("rollout_is", weigh.key)
    if reject.is_on():
        # Bounds that are not given fall back to those of the weights.
        least, most = rs_lower.or_else(lower), rs_upper.or_else(upper)
        used += [rs_level, least, most]
        name = rs_level.value or "token"
        found.put("rollout_rs", OLDER_NAMES.get(name, name), rs_level.or_else(reject).key)
        found.put("rollout_rs_threshold", most.number(2.0), most.or_else(reject).key)
        if least.value is not None:
            found.put("rollout_rs_threshold_lower", least.number(0), least.key)
    elif reject.value is not None:
        found.put_off("rollout_rs", reject.key)
    for one in (level, mode, lower, upper, normalize, rs_level, rs_lower, rs_upper):
        if one.value is None or one in used:
            continue
        switch = reject if one.key in _RS else weigh
        why = "tis_mode=truncate has no lower bound"
        if not switch.is_on():
            why = f"{switch.key} is not on"
        found.notes.append(f"{one.key}={one.value} is not used: {why}")


def _either(given: Layer, *names: str) -> _Given:
    """Reads a setting with several names. ValueError if two of them have different values."""
    found = [_Given(name, given[name]) for name in names if given.get(name) is not None]
    for first, second in itertools.pairwise(found):
        if first.value != second.value:
            raise ValueError(
                f"{KEY}.{first.key}={first.value!r} and {KEY}.{second.key}={second.value!r} "
                "contradict: drop one of them"
            )
    return found[-1] if found else _Given(names[0], None)


def _flag(value: Any, key: str) -> bool:
    if str(value).lower() not in ("true", "false"):
        raise ValueError(f"{KEY}.{key}={value!r}: give true or false")
    return str(value).lower() == "true"


def _number(value: Any, key: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{KEY}.{key}={value!r}: give a number") from None


def _function(value: Any, key: str) -> str:
    """slime writes `module.function`, here it is `module:function`."""
    module, _, name = str(value).replace(":", ".").rpartition(".")
    return f"{module}:{name}"


# What `value` names in the table.
_VALUES = {"flag": _flag, "number": _number, "function": _function}
