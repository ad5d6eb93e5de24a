"""Translates the keys of a configuration file."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from copy import deepcopy
from typing import Any, NamedTuple

from flowgrpo_rc.config.compat.overrides import Row, translate, write
from flowgrpo_rc.config.compat.rules import Setting

Path = tuple[str, ...]


class TranslatedTree(NamedTuple):
    """A file in this project's naming.

    Attributes:
      tree: its keys and values, nested.
      rows: one for each setting that had another name or value.
    """

    tree: dict[str, Any]
    rows: list[Row]


def leaves(tree: Mapping[str, Any], above: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yields the path and value of everything in a tree that is no filled section."""
    for name, value in tree.items():
        path = (*above, str(name))
        if isinstance(value, Mapping) and value:
            yield from leaves(value, path)
        else:
            yield path, value


def values_of(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the value of each key of a tree, such as {"rollout.n": 8}."""
    return {".".join(path): value for path, value in leaves(tree)}


def translate_tree(
    tree: Mapping[str, Any], known: Collection[str], beside: Mapping[str, Any]
) -> TranslatedTree:
    """Translates a tree. A key that neither system has stays, for the caller to refuse.

    Args:
      tree: the file's content, nested.
      known: this project's keys.
      beside: values of keys that are set elsewhere.

    Raises:
      ValueError: two names set one key to different values.
    """
    paths = {".".join(path): (path, value) for path, value in leaves(tree)}
    settings = [
        Setting(f"{key}={write(value)}", key, value, write(value))
        for key, (_, value) in paths.items()
    ]
    translated = translate(settings, known, beside=beside)
    found = deepcopy(dict(tree))
    for row in translated.rows:
        _remove(found, paths[row.key][0])
    for key, value in translated.values.items():
        _put(found, key, value)
    return TranslatedTree(found, list(translated.rows))


def _remove(tree: dict[str, Any], path: Path) -> None:
    """Removes a leaf, and the sections that are empty without it."""
    name, *below = path
    if below and isinstance(tree[name], dict):
        _remove(tree[name], tuple(below))
    if not below or not tree[name]:
        del tree[name]


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    *sections, name = key.split(".")
    for section in sections:
        if tree.get(section) is None:
            tree[section] = {}
        tree = tree[section]
    tree[name] = value
