"""Builds the rollout correction from layers of settings in the words of verl, verl-omni or slime.

A key that is set twice with different values is an error that names both. Nothing is dropped
without a note.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from flowgrpo_rc.config.foreign import Fields, foreign, mapping_of
from flowgrpo_rc.config.translate import Setting, applied
from flowgrpo_rc.correction.config import RolloutCorrectionConfig
from flowgrpo_rc.correction.presets import PRESETS
from flowgrpo_rc.correction.thresholds import KEY, OLDER_NAMES
from flowgrpo_rc.plugins import did_you_mean

Layer = Mapping[str, Any]
OWN_KEYS = tuple(f.name for f in dataclasses.fields(RolloutCorrectionConfig))
# Keys with one row are spellings of one setting.
_ROWS: Mapping[str, str | Fields] = {**foreign()["verl"], **foreign()["slime"]}
_SWITCHES = ("use_tis", "use_rollout_correction", "use_rs")
# In the table: the lower bound of weights, which is a part of their threshold here.
_LOWER = "lower"
_FILE_KEY = "custom_config_path"
KNOWN_KEYS = (*OWN_KEYS, "preset", *_ROWS, _FILE_KEY)
# A preset is named for these, so that it cannot be refined by others.
_FIXED_BY_PRESET = ("bypass_mode", "loss_type")
# What acts in both modes, and leaves the mode as it is; no document has `auto` thresholds.
_IN_BOTH_MODES = ("rollout_rs", "rollout_token_veto_threshold", "rollout_is")
# What depends on a switch, and goes with it.
_DEPENDENTS = {
    "rollout_is": ("rollout_is_mode", "rollout_is_batch_normalize"),
    "rollout_rs": ("rollout_rs_threshold", "rollout_rs_threshold_lower"),
}


class _Sourced(NamedTuple):
    """A value here, and the key that it comes from."""

    value: Any
    source: str


def rollout_correction(layers: Sequence[Layer]) -> tuple[RolloutCorrectionConfig, list[str]]:
    """Builds the rollout correction, checks it, and returns it with notes on what was translated.

    A later layer overrides an earlier one and refines its slime flags; a layer that names a preset
    replaces all earlier ones. A layer that asks for weights without a word on the mode gets
    decoupled mode, the default of the documents, if an earlier one has a mode in which weights are
    metrics alone; one that rejects or only measures keeps that mode, with a note.
    """
    settings: dict[str, Any] = {}
    notes: list[str] = []
    flags: dict[str, object] = {}
    for layer in layers:
        layer = _with_file(layer, notes)
        if layer.get("preset") is not None:
            settings = {}
            flags = {}
        new_flags = {key: value for key, value in layer.items() if key in foreign()["slime"]}
        new_rows = [_ROWS[key] for key in new_flags]
        flags = {key: value for key, value in flags.items() if _ROWS[key] not in new_rows}
        flags |= new_flags
        values = _translated({**layer, **flags} if new_flags else layer, notes)
        asking = _asks_for_weights(settings, values, new_flags)
        settings = _over(settings, values)
        says_mode = "bypass_mode" in values or "loss_type" in values
        metrics = settings.get("bypass_mode") and settings.get("loss_type") in (None, "ppo_clip")
        if says_mode or not metrics:
            continue
        acting = [f"{key}={values[key]}" for key in _IN_BOTH_MODES if key in values]
        if asking:
            settings["bypass_mode"] = False
            notes.append(
                f"{asking} -> bypass_mode=False; in bypass mode with ppo_clip weights would be "
                "metrics alone (bypass_mode=true, if that is meant)"
            )
        elif acting and "auto" not in str(values.get("rollout_rs_threshold")):
            notes.append(
                f"{acting[0]} -> bypass_mode=True stays, as the configuration has it; without a "
                "word on the mode the documents mean bypass_mode=false"
            )
    config = RolloutCorrectionConfig(**settings)
    try:
        config.validate()
    except ValueError as error:
        translated = f" (translated: {'; '.join(notes)})" if notes else ""
        raise ValueError(f"{error}{translated}") from error
    return config, notes


def _asks_for_weights(before: Layer, layer: Layer, flags: Layer) -> str:
    """Returns the setting of a layer that asks for weights where there were none; "" without any.

    slime's switches always do: its own default for the mode is decoupled.
    """
    for key in _SWITCHES:
        if str(flags.get(key)).lower() == "true":
            return f"{key}=true"
    level = layer.get("rollout_is")
    return "" if level is None or before.get("rollout_is") is not None else f"rollout_is={level}"


def _over(settings: Layer, over: Layer) -> dict[str, object]:
    """Returns settings with others over them. What depends on a switch that these turn off goes."""
    off = [names for switch, names in _DEPENDENTS.items() if over.get(switch, 0) is None]
    gone = {name for names in off for name in names}
    return {key: value for key, value in settings.items() if key not in gone} | dict(over)


def _with_file(layer: Layer, notes: list[str]) -> dict[str, object]:
    """Returns a layer with the keys of its slime file (`custom_config_path`), and notes them."""
    layer = {str(key): value for key, value in layer.items()}
    path = layer.pop(_FILE_KEY, None)
    if path is None:
        return layer
    file = f"{KEY}.{_FILE_KEY}={path}"
    in_file = mapping_of(Path(str(path)).expanduser(), file)
    for key, value in in_file.items():
        if layer.get(key, value) != value:
            raise _contradiction(f"{KEY}.{key}={layer[key]!r}", f"{file} with {key}={value!r}")
    notes.append(f"{_FILE_KEY}={path} -> {', '.join(in_file)}")
    return in_file | layer


def _contradiction(first: str, second: str) -> ValueError:
    return ValueError(f"{first} and {second} contradict: drop one of them")


def _translated(layer: Layer, notes: list[str]) -> dict[str, object]:
    """Translates a layer; ValueError for an unknown key or preset, or a contradiction."""
    for key in layer:
        if key not in KNOWN_KEYS:
            raise ValueError(
                f"{KEY}.{key}: unknown key{did_you_mean(key, KNOWN_KEYS)}; its keys are "
                f"{', '.join(OWN_KEYS)} and preset"
            )
    values = {key: layer[key] for key in OWN_KEYS if key in layer}
    level = layer.get("rollout_rs")
    if isinstance(level, str) and level in OLDER_NAMES:
        notes.append(f"rollout_rs={level} -> {OLDER_NAMES[level]}")
    for key, (value, source) in _foreign_settings(layer, notes).items():
        if values.get(key, value) != value:
            raise ValueError(
                f"{KEY}.{source} means {key}={value!r}, but {KEY}.{key}={values[key]!r}: drop one"
            )
        values[key] = value
        notes.append(f"{source} -> {key}={value}")
    return values if layer.get("preset") is None else _with_preset(layer["preset"], values, notes)


def _with_preset(name: object, values: dict[str, object], notes: list[str]) -> dict[str, object]:
    """Returns a preset's settings with others over them; its mode and loss are fixed."""
    if name not in PRESETS:
        raise ValueError(
            f"{KEY}.preset={name!r}{did_you_mean(str(name), PRESETS)}: there are "
            f"{', '.join(PRESETS)}"
        )
    preset = vars(getattr(RolloutCorrectionConfig, name)())
    for key in _FIXED_BY_PRESET:
        if values.get(key, preset[key]) != preset[key]:
            raise ValueError(
                f"{KEY}.preset={name} has {key}={preset[key]}, but {KEY}.{key}={values[key]} "
                "is given: choose another preset, or drop one of them"
            )
    default = vars(RolloutCorrectionConfig())
    changed = {key: value for key, value in preset.items() if value != default[key]}
    listed = ", ".join(f"{key}={value}" for key, value in changed.items()) or "metrics only"
    notes.append(f"preset={name} -> {listed}")
    return _over(changed, values)


def _foreign_settings(layer: Layer, notes: list[str]) -> dict[str, _Sourced]:
    """Returns the settings here that the keys of other systems mean."""
    rows = [(key, row) for key, row in _ROWS.items() if layer.get(key) is not None]
    is_on = {switch: _is_on(layer, switch) for switch in ("use_tis", "use_rs")}
    shared = _bounds_of_weights(layer) if is_on["use_rs"] else []
    settings: dict[str, _Sourced] = {}
    for key, row in sorted([*rows, *shared], key=lambda row: row[0] in _SWITCHES):
        fields: Fields = {} if isinstance(row, str) else row
        if not is_on.get(fields.get("switch", ""), True):
            if key not in dict(shared):
                notes.append(f"{key}={layer[key]} is not used: {fields['switch']} is not on")
            continue
        value = _VALUES[fields["value"]](layer[key], key) if "value" in fields else layer[key]
        outcome = applied(row, Setting("", key, value, ""), layer)
        if outcome.stops:
            raise ValueError(f"{KEY}.{key}={layer[key]}: {outcome.why}; drop it")
        if outcome.why:
            notes.append(f"{key}: {outcome.why}")
        for name, value in outcome.settings.items():
            earlier = settings.setdefault(name, _Sourced(value, key))
            # A switch says only what the keys that belong to it leave open.
            if earlier.value != value and key not in _SWITCHES:
                raise _contradiction(*(f"{KEY}.{x}={layer[x]!r}" for x in (earlier.source, key)))
    _join_bounds(settings, notes)
    return settings


def _is_on(layer: Layer, switch: str) -> bool:
    keys = [key for key in _ROWS if _ROWS[key] == _ROWS[switch] and layer.get(key) is not None]
    flags = [_flag(layer[key], key) for key in keys]
    if len({*flags}) > 1:
        raise _contradiction(*(f"{KEY}.{key}={layer[key]!r}" for key in keys))
    return any(flags)


def _bounds_of_weights(layer: Layer) -> list[tuple[str, str | Fields]]:
    """Returns the bounds of weights that rejection falls back to, with the rows of its own."""
    return [
        (key, _ROWS[f"rs_{bound}"])
        for bound in ("lower_bound", "upper_bound")
        for key in _ROWS
        if layer.get(f"rs_{bound}") is None and _ROWS[key] == _ROWS[f"tis_{bound}"]
        if layer.get(key) is not None
    ]


def _join_bounds(settings: dict[str, _Sourced], notes: list[str]) -> None:
    """Makes one threshold of the bounds of weights; only some modes have a lower one."""
    lower = settings.pop(_LOWER, None)
    upper = settings.get("rollout_is_threshold")
    if lower is not None and lower.source == "tis_clip_low" and lower.value > 0:
        settings.setdefault("rollout_is_mode", _Sourced("clip", lower.source))
    mode = settings["rollout_is_mode"].value if "rollout_is_mode" in settings else "truncate"
    if upper is None or mode is None:
        return
    if mode == "truncate":
        if lower is not None:
            notes.append(f"{lower.source} is not used by weights of tis_mode=truncate")
        return
    lowest = 1 / upper.value if upper.value else 0.0
    source = upper.source
    if lower is not None:
        lowest = lower.value
        source = lower.source if source in _SWITCHES else f"{lower.source} {source}"
    settings["rollout_is_threshold"] = _Sourced(f"{lowest}_{upper.value}", source)


def _flag(value: object, key: str) -> bool:
    if str(value).lower() not in ("true", "false"):
        raise ValueError(f"{KEY}.{key}={value!r}: give true or false")
    return str(value).lower() == "true"


def _number(value: Any, key: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{KEY}.{key}={value!r}: give a number") from None


def _function(value: object, key: str) -> str:
    """Returns slime's `module.function` as `module:function`, and the name alone of slime's own."""
    module, _, name = str(value).replace(":", ".").rpartition(".")
    row = _ROWS[key]
    own_names = () if isinstance(row, str) else row.get("same", ())
    return name if name in own_names else f"{module}:{name}"


# What `value` names in the table.
_VALUES = {"flag": _flag, "number": _number, "function": _function}
