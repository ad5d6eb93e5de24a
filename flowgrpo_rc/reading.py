"""Reading what other people may have written: small JSON files, and blame for what is damaged."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_MOST_BYTES = 64 * 2**20
_MOST_LEVELS = 100  # of lists and mappings inside of one another; readers walk them by recursion


def read_mapping(path: Path) -> dict[str, Any]:
    """Reads a JSON file that holds a mapping, neither too large nor too deep."""
    if path.stat().st_size > _MOST_BYTES:
        raise ValueError(f"{path} cannot be read: it has more than {_MOST_BYTES >> 20} MiB")
    with blaming(path):
        return parse_mapping(path.read_bytes())


def parse_mapping(text: str | bytes) -> dict[str, Any]:
    """Parses JSON that holds a mapping, nested no deeper than readers can walk."""
    try:
        found = json.loads(text)
    except RecursionError as error:
        raise ValueError(f"it is nested deeper than {_MOST_LEVELS} levels") from error
    if not isinstance(found, dict):
        raise ValueError("it holds no mapping")
    level: list[Any] = [found]
    for _ in range(_MOST_LEVELS):
        level = [item for node in level for item in _items(node)]
        if not level:
            return found
    raise ValueError(f"it is nested deeper than {_MOST_LEVELS} levels")


@contextmanager
def blaming(what: Path | str) -> Iterator[None]:
    """Names a file, or a setting and its file, in every error that comes of its content."""
    try:
        yield
    # Every exception, since libraries raise what they like where they expect another content.
    except Exception as error:
        if str(what) in str(error):
            raise
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        first = (reason or type(error).__name__).splitlines()[0]
        raise ValueError(f"{what} cannot be read: {first}") from error


def _items(node: Any) -> list[Any]:
    if isinstance(node, dict):
        return list(node.values())
    return node if isinstance(node, list) else []
