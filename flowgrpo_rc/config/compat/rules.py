"""What becomes of a key of another system: another name here, a value in other units, or no
counterpart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple


class Setting(NamedTuple):
    """An override: line as it was given; key without `+`; value parsed; text of the value as it was
    written.
    """

    line: str
    key: str
    value: Any
    text: str


class Outcome(NamedTuple):
    """settings: key -> value here, empty without a counterpart; why: what the user should know.

    stops: there is no counterpart, and leaving the key out trains something else.
    """

    settings: Mapping[str, Any] = {}
    why: str = ""
    stops: bool = False


# (setting, values of all settings by key) -> what becomes of it
Rule = Callable[[Setting, Mapping[str, Any]], Outcome]
AS_HERE = "as here"


class Written(str):
    """A value that stands in the command line exactly as it is here, such as an interpolation."""

    __slots__ = ()


def to(here: str, values: Mapping[Any, Any] | None = None) -> Rule:
    """Another name; `values` are those with another spelling, all others stay as they are
    written.
    """

    def rule(setting: Setting, given: Mapping[str, Any]) -> Outcome:
        for there, value in (values or {}).items():
            if same(there, setting.value):
                return Outcome({here: value})
        return Outcome({here: Written(setting.text)})

    return rule


def reported(why: str) -> Rule:
    """No counterpart, and none is needed: the same is trained without it."""
    return lambda setting, given: Outcome(why=why)


def stops(why: str, *, unless: Iterable[Any] = ()) -> Rule:
    """No counterpart, and without it something else is trained, `unless` the value means what is
    done here anyway.
    """

    def rule(setting: Setting, given: Mapping[str, Any]) -> Outcome:
        if any(same(value, setting.value) for value in unless):
            return Outcome(why=AS_HERE)
        return Outcome(why=why, stops=True)

    return rule


def same(one: Any, other: Any) -> bool:
    """Equal, and not by True == 1."""
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


def each(section: str, names: str, rule: Rule) -> dict[str, Rule]:
    """One rule for several keys of a section; `names` are separated by white space."""
    return {f"{section}.{name}": rule for name in names.split()}
