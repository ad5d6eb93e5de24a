"""Atomic writes, and redaction of secrets."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    pass


REDACTED = "***"


_SECRET_NAME = r"(?:\w*(?:api|access|private)_?key|(?:\w+_)?(?:secret|password|passwd|credentials?)|authorization"


_SECRET_NAME += r"|(?:\w+_)?token)"


_SECRET_KEY = re.compile(_SECRET_NAME, re.IGNORECASE)


_SECRET_ASSIGNMENT = re.compile(
    rf"(?<!\w)({_SECRET_NAME}\s*[=:]\s*(?:Bearer\s+)?)(?!//)[^\s,;}}\]]+", re.IGNORECASE
)


_SECRET_VALUE = re.compile(
    r"\b(?:hf_\w{16,}|sk-[\w-]{16,}|gh[pousr]_\w{16,})\b|(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"
)


def write_atomic(path: Path, content: bytes) -> None:
    """Replaces `path` by `content` through a temporary file beside it that is on the disk before
    the rename.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def redact(value: Any) -> Any:
    """`value` (a tree of mappings, lists and scalars) without passwords, keys and tokens."""
    if isinstance(value, Mapping):
        return {
            key: REDACTED
            if _SECRET_KEY.fullmatch(str(key)) and item not in (None, "")
            else redact(item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [redact(item) for item in value]
    if isinstance(value, str):
        return _SECRET_ASSIGNMENT.sub(rf"\1{REDACTED}", _SECRET_VALUE.sub(REDACTED, value))
    return value
