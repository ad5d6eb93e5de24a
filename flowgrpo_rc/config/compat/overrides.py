"""Translates overrides in another system's naming, and makes a table of what became of them."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from flowgrpo_rc.config.compat.rules import REPLACED, Outcome, Rule, Setting, Written
from flowgrpo_rc.config.compat.verl_omni import PREFIX, REWARDS, RULES, UNSAID, WHOLE

REWARD = "reward.terms"
# What may become of a setting.
TRANSLATED = "translated"
NONE = "no counterpart"
STOPS = "stops the run"
IGNORED = "ignored"
_KIND_WIDTH = len(NONE)
# Characters of an override in a summary.
_LONGEST = 80


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
      values: key here -> value, of the settings that have been translated.
      rows: one for each setting that had another name or value.
    """

    lines: Sequence[str]
    values: Mapping[str, Any]
    rows: Sequence[Row]


def is_whole_command(keys: Collection[str]) -> bool:
    """Returns whether these are the keys of a whole command line of verl-omni, not of a few."""
    return all(key in keys for key in WHOLE)


def translate(
    settings: Sequence[Setting],
    known: Collection[str],
    *,
    beside: Mapping[str, Any] | None = None,
    whole: bool = False,
) -> TranslatedOverrides:
    """Translates settings. A key that neither system has stays, for the caller to refuse.

    Args:
      settings: the overrides as given.
      known: this project's keys.
      beside: values of keys that are set elsewhere, which rules look at.
      whole: whether what is not given is verl-omni's default.

    Raises:
      ValueError: two names of the other system set one key to different values.
    """
    # Of several settings of one key the last one counts, as with Hydra.
    last = {setting.key: setting for setting in settings}
    given = dict(beside or {}) | {key: setting.value for key, setting in last.items()}
    lines = _Lines()
    values: dict[str, Any] = {}
    rows: list[Row] = []
    for setting in last.values():
        outcome = _outcome(setting, given, known)
        if outcome is None:
            lines.add(setting.key, setting.line, setting)
            continue
        here = [f"{key}={write(value)}" for key, value in outcome.settings.items()]
        for key, line in zip(outcome.settings, here, strict=True):
            lines.add(key, line, setting)
        values |= _plain(outcome.settings, setting)
        if here == [setting.line]:
            continue
        told = [*here, outcome.why] if outcome.why else here
        rows.append(Row(_kind(outcome), setting.line, "; ".join(told), setting.key))
    rows = [lines.with_replacement(row) for row in rows]
    if whole:
        rows += _unsaid(given)
    return TranslatedOverrides(lines=lines.lines(), values=values, rows=rows)


def _plain(settings: Mapping[str, Any], setting: Setting) -> dict[str, Any]:
    """Returns settings with the value itself in place of how it was written."""
    return {
        key: setting.value if isinstance(value, Written) and value == setting.text else value
        for key, value in settings.items()
    }


class _Lines:
    """Overrides in this project's naming, and which setting of the user each came from."""

    def __init__(self) -> None:
        self._lines: dict[str, tuple[str, Setting]] = {}
        self._replaced: dict[str, str] = {}

    def add(self, key: str, line: str, setting: Setting) -> None:
        """Adds a line. One in this project's own words replaces an earlier translated one.

        Raises:
          ValueError: an earlier line says something else, and neither replaces the other.
        """
        if key in self._lines:
            other_line, other = self._lines[key]
            differs = line.partition("=")[2] != other_line.partition("=")[2]
            if other.key != setting.key and differs:
                if setting.key != key:
                    raise ValueError(
                        f"{other.line} and {setting.line} both set {key}, and contradict: drop one "
                        "of them"
                    )
                self._replaced[other.key] = setting.line
        self._lines[key] = (line, setting)

    def lines(self) -> list[str]:
        return [line for line, _ in self._lines.values()]

    def with_replacement(self, row: Row) -> Row:
        """Says in a row what has replaced it, if anything has."""
        if row.key not in self._replaced:
            return row
        settings = row.here.split("; ")[1:]
        return row._replace(here="; ".join([f"{REPLACED} {self._replaced[row.key]}", *settings]))


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
    return _columns([row[:3] for row in rows])


def summary(rows: Sequence[Row]) -> str:
    """Returns the rows that tell something as `table` does, and the others in a line each.

    The others are those that only lose a prefix, and keys that need no counterpart.
    """
    bare = [row for row in rows if row.here == row.given.lstrip("+").removeprefix(PREFIX)]
    needless = [row for row in rows if row.kind == NONE and not row.here.startswith(REPLACED)]
    shown = [
        (row.kind, _short(row.given), row.here)
        for row in rows
        if row not in bare and row not in needless
    ]
    parts = [_columns(shown)]
    if bare:
        parts.append(f"{TRANSLATED:{_KIND_WIDTH}}  {len(bare)} that only lose {PREFIX}")
    if needless:
        keys = ", ".join(dict.fromkeys(row.key.removeprefix(PREFIX) for row in needless))
        parts.append(
            textwrap.fill(
                f"{NONE}  not needed, or said elsewhere (--cfg job tells why): {keys}",
                100,
                subsequent_indent=" " * (_KIND_WIDTH + 2),
                break_long_words=False,
                break_on_hyphens=False,
            )
        )
    return "\n".join(part for part in parts if part)


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _columns(cells: Sequence[tuple[str, ...]]) -> str:
    if not cells:
        return ""
    lines = [("", "given", "here"), *cells]
    widths = [max(_KIND_WIDTH, *(len(line[0]) for line in lines))]
    widths.append(max(len(line[1]) for line in lines))
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
    unsaid = []
    if not any(key.startswith(REWARDS) and value is not None for key, value in given.items()):
        why = "there the rows of the data choose it by data_source: set it"
        unsaid.append(Row(STOPS, f"{REWARD} (not given)", why, REWARD))
    for key, value in UNSAID.items():
        if key not in given and key.removeprefix(PREFIX) not in given:
            outcome = RULES[key](Setting("", key, value, str(value)), given)
            if outcome.stops:
                unsaid.append(Row(STOPS, f"{key}={value} (not given)", outcome.why, key))
    return unsaid


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


def _names(name: str, key: str) -> bool:
    name, key = name.removeprefix(PREFIX), key.removeprefix(PREFIX)
    return key == name or key.startswith(f"{name}.")
