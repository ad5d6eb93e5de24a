"""A setting in another system's words, what becomes of it, and the table `foreign.yaml`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

# Keys of verl-omni and their values, which the rule of one key may look at.
Given = Mapping[str, Any]
PREFIX = "actor_rollout_ref."
# Begins the reason of a key whose place other settings of the user take.
REPLACED = "replaced by"


class Setting(NamedTuple):
    """An override, or a key of a file.

    Attributes:
      line: as it was given.
      key: without `+`.
      value: parsed.
      text: the value as it was written.
    """

    line: str
    key: str
    value: Any
    text: str


class Outcome(NamedTuple):
    """What becomes of a setting.

    Attributes:
      settings: key and value here; empty without a counterpart.
      why: what the user should know.
      stops: whether the run must stop: there is no counterpart, and without the key something else
        is trained.
    """

    settings: Mapping[str, Any] = {}
    why: str = ""
    stops: bool = False


class Written(str):
    """A value that is passed on exactly as it is written, such as an interpolation."""

    __slots__ = ()


@cache
def foreign(part: str) -> Mapping[str, Any]:
    """Returns a part of `foreign.yaml`, with a line for each key."""
    rows = _file()[part]
    if part == "verl_omni":
        return {section: _one_line_each(lines) for section, lines in rows.items()}
    return _one_line_each(rows)


@cache
def _file() -> dict[str, dict[str, Any]]:
    path = Path(__file__).with_name("foreign.yaml")
    found: dict[str, dict[str, Any]] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return found


def _one_line_each(rows: Mapping[str, Any]) -> dict[str, Any]:
    return {name: row for names, row in rows.items() for name in names.split() or [""]}
