"""Translates overrides in another system's naming, and makes a table of what became of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from flowgrpo_rc.config.compat.rules import Outcome, Rule, Setting, Written
from flowgrpo_rc.config.compat.verl_omni import PREFIX, RULES, UNSAID, WHOLE

REWARD = "reward.terms"
# What may become of a setting.
TRANSLATED = "translated"
NONE = "no counterpart"
STOPS = "stops the run"
IGNORED = "ignored"


class Row(NamedTuple):
    """A line of the table.

    Attributes:
      kind: what became of the setting.
      given: the setting as it was given.
      here: what it is here, or why it is nothing.
      key: of the setting.
    """

    kind: str
    given: str
    here: str
    key: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class TranslatedOverrides:
    """Overrides in this project's naming.

    Attributes:
      lines: the overrides.
      rows: one for each setting that had another name or value.
    """

    lines: Sequence[str]
    rows: Sequence[Row]


def is_whole_command(keys: Collection[str]) -> bool:
    """Returns whether these are the keys of a whole command line of verl-omni, not of a few."""
    return all(key in keys for key in WHOLE)


def translate(
    settings: Sequence[Setting], known: Collection[str], *, whole: bool = False
) -> TranslatedOverrides:
    """Translates settings. A key that neither system has stays, for the caller to refuse.

    Args:
      settings: the overrides as given.
      known: this project's keys.
      whole: whether what is not given is verl-omni's default.

    Raises:
      ValueError: two names set one key to different values.
    """
    given = {setting.key: setting.value for setting in settings}
    lines: dict[str, tuple[str, Setting]] = {}
    rows: list[Row] = []
    for setting in settings:
        outcome = _outcome(setting, given, known)
        if outcome is None:
            _add(lines, setting.key, setting.line, setting)
            continue
        here = [f"{key}={write(value)}" for key, value in outcome.settings.items()]
        for key, line in zip(outcome.settings, here, strict=True):
            _add(lines, key, line, setting)
        if here == [setting.line]:
            continue
        told = [*here, outcome.why] if outcome.why else here
        rows.append(Row(_kind(outcome), setting.line, "; ".join(told), setting.key))
    if whole:
        rows += _unsaid(given)
    return TranslatedOverrides(lines=[line for line, _ in lines.values()], rows=rows)


def _kind(outcome: Outcome) -> str:
    if outcome.stops:
        return STOPS
    return TRANSLATED if outcome.settings else NONE


def rows_of_notes(notes: Iterable[str]) -> list[Row]:
    """Returns notes such as `use_tis -> rollout_is=token` as rows."""
    return [Row(TRANSLATED, *note.partition(" -> ")[::2]) for note in notes]


def resolved(rows: Iterable[Row], ignore: Sequence[str]) -> list[Row]:
    """Marks the rows that `compat.ignore` names. It names keys without counterpart, or sections."""
    return [
        row._replace(kind=IGNORED)
        if row.kind == STOPS and any(_names(name, row.key) for name in ignore)
        else row
        for row in rows
    ]


def check(rows: Sequence[Row], ignore: Sequence[str]) -> None:
    """Raises ValueError if a key without counterpart would change what is trained.

    Also if `compat.ignore` names a key that would not.
    """
    for name in ignore:
        if not any(_names(name, row.key) for row in rows if row.kind in (IGNORED, STOPS)):
            raise ValueError(
                f"compat.ignore names {name}, but no override of that name is without counterpart "
                "and would change what is trained: drop it"
            )
    left = [row for row in rows if row.kind == STOPS]
    if left:
        reasons = "; ".join(f"{row.given} ({row.here})" for row in left)
        keys = ",".join(dict.fromkeys(row.key.removeprefix(PREFIX) for row in left))
        raise ValueError(
            f"without a counterpart here, and would change what is trained: {reasons}. Set what is "
            f"named there, or go on without them by compat.ignore=[{keys}]"
        )


def table(rows: Sequence[Row]) -> str:
    """Returns all rows in three columns; empty without any."""
    if not rows:
        return ""
    lines = [("", "given", "here"), *(row[:3] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in (0, 1)]
    return "\n".join(f"{a:{widths[0]}}  {b:{widths[1]}}  {c}".rstrip() for a, b, c in lines)


def write(value: Any) -> str:
    """Returns a value in the grammar of overrides."""
    if isinstance(value, Written):
        return str(value)
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{','.join(write(item) for item in value)}]"
    return str(value)


def _unsaid(given: Mapping[str, Any]) -> list[Row]:
    """Returns a row for each default of verl-omni that has no counterpart and is not given."""
    rows = []
    if not any(key.startswith(REWARD) for key in given):
        rows.append(
            Row(
                STOPS,
                "reward.terms (not given)",
                "there the rows of the data choose it by data_source",
                REWARD,
            )
        )
    for key, value in UNSAID.items():
        if key not in given and key.removeprefix(PREFIX) not in given:
            outcome = RULES[key](Setting("", key, value, str(value)), given)
            if outcome.stops:
                rows.append(Row(STOPS, f"{key}={value} (not given)", outcome.why, key))
    return rows


def _outcome(setting: Setting, given: Mapping[str, Any], known: Collection[str]) -> Outcome | None:
    """Returns what becomes of a setting; None if it is not translated."""
    rule = RULES.get(setting.key)
    if rule is not None:
        return rule(setting, given)
    own = setting.key.removeprefix(PREFIX)
    if own in known:
        return None if own == setting.key else Outcome({own: Written(setting.text)})
    for key in (setting.key, PREFIX + own):
        rule = _rule_above(key)
        if rule is not None:
            return rule(setting._replace(key=key), given)
    return None if own == setting.key else Outcome({own: Written(setting.text)})


def _rule_above(key: str) -> Rule | None:
    """Returns the rule of a key or of the nearest section above it."""
    while key:
        if key in RULES:
            return RULES[key]
        key = key.rpartition(".")[0]
    return None


def _add(lines: dict[str, tuple[str, Setting]], key: str, line: str, setting: Setting) -> None:
    """Adds a line for a key. Of two with the same name the later one counts, as with Hydra."""
    if key in lines:
        other_line, other = lines[key]
        if other.key != setting.key and line.partition("=")[2] != other_line.partition("=")[2]:
            raise ValueError(
                f"{other.line} and {setting.line} both set {key}, and contradict: drop one of them"
            )
    lines[key] = (line, setting)


def _names(name: str, key: str) -> bool:
    name, key = name.removeprefix(PREFIX), key.removeprefix(PREFIX)
    return key == name or key.startswith(f"{name}.")
