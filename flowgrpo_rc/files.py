"""Writing files whole or not at all, and taking secrets out of what is written."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

REDACTED = "***"
TEMPORARY = ".tmp"  # how names of files end that are not complete

# Names of settings that hold a secret, such as `api_key`, `db_password` or `hf_token`.
_SECRET_NAME = (
    r"(?:\w*(?:api|access|private)_?key"
    r"|(?:\w+_)?(?:secret|password|passwd|credentials?)"
    r"|authorization"
    r"|(?:\w+_)?token)"
)
_SECRET_KEY = re.compile(_SECRET_NAME, re.IGNORECASE)
# name=secret or name: secret inside of a text; group 1 is what stays.
_SECRET_ASSIGNMENT = re.compile(
    rf"(?<!\w)({_SECRET_NAME}\s*[=:]\s*(?:Bearer\s+)?)(?!//)[^\s,;}}\]]+", re.IGNORECASE
)
# Keys that are known by their first letters, and user:password@ in a URL.
_SECRET_VALUE = re.compile(
    r"\b(?:hf_\w{16,}|sk-[\w-]{16,}|gh[pousr]_\w{16,})\b|(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"
)


def write_atomic(path: Path, content: bytes) -> None:
    """Writes a file such that a crash leaves either the old content or the new one.

    Args:
      path: the file; its folder exists.
      content: everything that the file shall hold.
    """
    temporary = path.with_name(f".{path.name}{TEMPORARY}")
    with temporary.open("wb") as file:
        file.write(content)
        # The content has to be on the disk before the name is, or a crash leaves an empty file.
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    # The new name is an entry of the folder, which is written to the disk for itself.
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def plain_yaml(path: Path) -> dict[str, Any]:
    """Reads a mapping from a YAML file that this package has written.

    Such a file has no aliases (`*name`), a few of which may stand for billions of values.

    Raises:
      ValueError: the file is damaged, holds no mapping, or has an alias.
    """
    try:
        text = path.read_text(encoding="utf-8")
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text)):
            raise ValueError("it has YAML aliases")
        found = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {' '.join(str(error).split())}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is damaged: it holds no mapping")
    return found


def redact(value: Any) -> Any:
    """Replaces passwords, keys and tokens by `***`.

    Args:
      value: a tree of mappings, lists and scalars, such as a configuration, or a text.

    Returns:
      A copy without secrets. A secret is known by the name that it is assigned to or by its form.
    """
    if isinstance(value, Mapping):
        return {key: _redacted_item(key, item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact(item) for item in value]
    if isinstance(value, str):
        return _SECRET_ASSIGNMENT.sub(rf"\1{REDACTED}", _SECRET_VALUE.sub(REDACTED, value))
    return value


def _redacted_item(key: object, item: Any) -> Any:
    if _SECRET_KEY.fullmatch(str(key)) and item not in (None, ""):
        return REDACTED
    return redact(item)
