"""Keys of other systems, translated before the configuration is built; what was translated is reported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from flowgrpo_rc.correction.bands import KEY
from flowgrpo_rc.correction.config import RolloutCorrectionConfig
from flowgrpo_rc.correction.translate import FILE_KEY, Translation, translate

Layer = Mapping[str, Any]


def rollout_correction(layers: Sequence[Layer]) -> tuple[RolloutCorrectionConfig, list[str]]:
    """The rollout correction from layers of settings (a file's, the command line's), and what was translated.

    Inside a layer two keys that contradict each other are an error; a later layer overrides an earlier one, and one
    that names a preset replaces it. The result is validated.
    """
    settings: dict[str, Any] = {}
    notes: list[str] = []
    for layer in layers:
        found = _with_file(layer)
        if "preset" in layer:
            settings = {}
        settings |= found.settings
        notes += found.notes
    config = RolloutCorrectionConfig(**settings)
    config.validate()
    return config, notes


def _with_file(layer: Layer) -> Translation:
    """`translate`, with the keys of a slime configuration file (`custom_config_path`) beside the others."""
    given = dict(layer)
    path = given.pop(FILE_KEY, None)
    if path is None:
        return translate(given)
    there = _read_mapping(Path(str(path)).expanduser())
    for key, value in there.items():
        if key in given and given[key] != value:
            raise ValueError(
                f"{KEY}.{key}={given[key]!r} and {KEY}.{FILE_KEY}={path} with {key}={value!r} contradict: drop one"
            )
    found = translate(there | given)
    return Translation(found.settings, (f"{FILE_KEY}={path} -> {', '.join(map(str, there))}", *found.notes))


def _read_mapping(path: Path) -> dict[str, Any]:
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{KEY}.{FILE_KEY}={path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{KEY}.{FILE_KEY}={path} must hold a mapping of keys such as use_tis: true")
    return found
