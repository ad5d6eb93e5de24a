"""Reads the table of causes: what is wrong with a rollout or an update, and where to mend it.

A verdict of `calibrate` says what mends an engine, `diagnose` names the keys of another trainer.
"""

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

TABLE = Path(__file__).with_name("causes.yaml")


class Symptom(NamedTuple):
    """Something that is wrong."""

    cause: str  # a name of the table
    evidence: str  # a sentence with numbers


class Cause(NamedTuple):
    """A row of the table; "" for what it lacks."""

    replay: str = ""  # what shows it in a replay or a record
    dump: str = ""  # what shows it in the dump of another trainer
    mend: str = ""  # what mends it in an engine
    keys: str = ""  # the row of keys that mend it


@cache
def causes() -> dict[str, Cause]:
    """Returns the causes by name."""
    return {name: Cause(**row) for name, row in _table()["causes"].items()}


def keys_of(cause: str, trainer: str) -> str:
    """Returns what mends a cause in the keys of a trainer, or of all if it is not known."""
    table = _table()
    cells = table["keys"][causes()[cause].keys]
    by_trainer: dict[str, str] = dict(zip(table["trainers"], cells, strict=True))
    everyone = "; ".join(f"{name}: {keys}" for name, keys in by_trainer.items())
    return by_trainer.get(trainer, everyone)


@cache
def _table() -> dict[str, Any]:
    return yaml.safe_load(TABLE.read_text(encoding="utf-8"))
