"""A setting in another system's words, what may become of it, and the table `foreign.yaml`."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

# Keys and values, for rules of one key that look at others.
Given = Mapping[str, Any]
PREFIX = "actor_rollout_ref."
# Begins the reason of a key whose place other settings of the user take.
REPLACED = "replaced by"
# A value that is passed on as it was written, such as an interpolation.
AS_GIVEN = object()


class Setting(NamedTuple):
    """An override, or a key of a file; `key` is without `+`, and `text` is the value as written."""

    line: str
    key: str
    value: Any
    text: str


class Outcome(NamedTuple):
    """Says what becomes of a setting."""

    settings: Mapping[str, Any] = {}  # key and value here; empty without a counterpart
    why: str = ""  # what the user should know
    # Whether there is no counterpart, and without the key something else would be trained.
    stops: bool = False


@cache
def foreign() -> Mapping[str, Mapping[str, Any]]:
    """Returns the row of each key, by the part of `foreign.yaml` that it stands in."""
    parts = yaml.safe_load(Path(__file__).with_name("foreign.yaml").read_text(encoding="utf-8"))
    found: dict[str, dict[str, Any]] = {}
    for part, rows in parts.items():
        # verl-omni's keys stand in sections, those of the other parts do not.
        sections = rows if part == "verl_omni" else {"": rows}
        found[part] = {
            f"{section}.{name}".strip("."): row
            for section, lines in sections.items()
            for names, row in lines.items()
            for name in names.split() or [""]
        }
    return found


def mapping_of(path: Path, named: str) -> dict[str, Any]:
    """Reads a YAML file of the user; ValueError with its name if it holds no mapping."""
    try:
        found = OmegaConf.to_container(OmegaConf.load(path))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise ValueError(f"{named} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{named} must hold a mapping of keys")
    return {str(key): value for key, value in found.items()}
