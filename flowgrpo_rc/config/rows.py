"""What became of settings in another system's words: a table to print, and what stops the run."""

import textwrap
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from flowgrpo_rc.config.foreign import PREFIX

# What may become of a setting.
TRANSLATED = "translated"
NONE = "no counterpart"
STOPS = "stops the run"
IGNORED = "ignored"
REPEATED = "given again"
# Begins the reason of a key whose place other settings of the user take.
REPLACED = "replaced by"
_KIND_WIDTH = len(NONE)
# Characters of an override in a summary.
_LONGEST = 80


class Row(NamedTuple):
    """A line of the table; `here` is what a setting is here, or why it is nothing."""

    kind: str
    given: str
    here: str
    key: str = ""


def resolved(rows: Iterable[Row], ignore: Sequence[str]) -> list[Row]:
    """Marks the rows that `compat.ignore` names. It names keys without counterpart, or sections."""
    return [
        row._replace(kind=IGNORED)
        if row.kind == STOPS and any(_names(name, row.key) for name in ignore)
        else row
        for row in rows
    ]


def check(rows: Sequence[Row], ignore: Sequence[str]) -> None:
    """Refuses keys that would change what is trained, and needless names in `compat.ignore`."""
    for name in ignore:
        if not any(_names(name, row.key) for row in rows if row.kind in (IGNORED, STOPS)):
            raise ValueError(
                f"compat.ignore names {name}, but no override of that name is without counterpart "
                "and would change what is trained: drop it"
            )
    stopping = [row for row in rows if row.kind == STOPS]
    if stopping:
        reasons = "; ".join(f"{row.given} ({row.here})" for row in stopping)
        keys = ",".join(dict.fromkeys(row.key.removeprefix(PREFIX) for row in stopping))
        raise ValueError(
            f"without a counterpart here, and would change what is trained: {reasons}. Set what is "
            f"named there, or go on without them by compat.ignore=[{keys}]"
        )


def _names(name: str, key: str) -> bool:
    return f"{key.removeprefix(PREFIX)}.".startswith(f"{name.removeprefix(PREFIX)}.")


def table(rows: Sequence[Row]) -> str:
    """Returns all rows in three columns; empty without any."""
    return _columns([row[:3] for row in rows])


def summary(rows: Sequence[Row]) -> str:
    """Returns the rows that tell something as `table` does; those that only lose a prefix, and keys
    that need no counterpart, in a line each.
    """
    bare = [row for row in rows if row.here == row.given.lstrip("+").removeprefix(PREFIX)]
    needless = [row for row in rows if row.kind == NONE and not row.here.startswith(REPLACED)]
    shown = [row for row in rows if row not in bare and row not in needless]
    lines = [_columns([(row.kind, _short(row.given), row.here) for row in shown])]
    if bare:
        lines.append(f"{TRANSLATED:{_KIND_WIDTH}}  {len(bare)} that only lose {PREFIX}")
    if needless:
        keys = ", ".join(dict.fromkeys(row.key.removeprefix(PREFIX) for row in needless))
        text = f"{NONE}  not needed, or said elsewhere (--cfg job tells why): {keys}"
        indent = " " * (_KIND_WIDTH + 2)
        lines += textwrap.wrap(
            text, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
    return "\n".join(line for line in lines if line)


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _columns(cells: Sequence[tuple[str, ...]]) -> str:
    if not cells:
        return ""
    lines = [("", "given", "here"), *cells]
    widths = [max(_KIND_WIDTH, *(len(line[0]) for line in lines))]
    widths.append(max(len(line[1]) for line in lines))
    return "\n".join(f"{a:{widths[0]}}  {b:{widths[1]}}  {c}".rstrip() for a, b, c in lines)
