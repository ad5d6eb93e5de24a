"""Rules that say what becomes of another system's key here.

It may have another name, a value in other units, or no counterpart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple


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
    """What a rule makes of a setting.

    Attributes:
      settings: key and value here; empty without a counterpart.
      why: what the user should know.
      stops: whether the run must stop: there is no counterpart, and without the key something else
        is trained.
    """

    settings: Mapping[str, Any] = {}
    why: str = ""
    stops: bool = False


# Takes a setting and the values of all settings by key.
Rule = Callable[[Setting, Mapping[str, Any]], Outcome]
AS_HERE = "as here"
# Begins the reason of a key whose place other settings of the user take.
REPLACED = "replaced by"


class Written(str):
    """A value that is passed on exactly as it is written, such as an interpolation."""

    __slots__ = ()


def to(here: str, values: Mapping[Any, Any] | None = None) -> Rule:
    """Makes a rule that gives a key another name.

    Args:
      here: the name.
      values: the values that have another spelling here; all others stay as they are written.
    """

    def rule(setting: Setting, given: Mapping[str, Any]) -> Outcome:
        for there, value in (values or {}).items():
            if same(there, setting.value):
                return Outcome({here: value})
        return Outcome({here: Written(setting.text)})

    return rule


def reported(why: str) -> Rule:
    """Makes a rule for a key that needs no counterpart: without it the same is trained."""
    return lambda setting, given: Outcome(why=why)


def stops(why: str, *, unless: Iterable[Any] = ()) -> Rule:
    """Makes a rule for a key without counterpart, without which something else is trained.

    Args:
      why: what the user can do.
      unless: values that mean what is done here anyway.
    """

    def rule(setting: Setting, given: Mapping[str, Any]) -> Outcome:
        if any(same(value, setting.value) for value in unless):
            return Outcome(why=AS_HERE)
        return Outcome(why=why, stops=True)

    return rule


def same(one: Any, other: Any) -> bool:
    """Returns whether two values are equal; True and 1 are not."""
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


def each(section: str, names: str, rule: Rule) -> dict[str, Rule]:
    """Gives several keys of a section one rule. White space separates the `names`."""
    return {f"{section}.{name}": rule for name in names.split()}
