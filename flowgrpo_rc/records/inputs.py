"""Digests of the files that a run reads, so that it does not go on with other contents."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from flowgrpo_rc.files import write_atomic

T = TypeVar("T")
LARGE = 64 * 2**20  # bytes; of a larger file only the ends are read
_END = 2**20
_SUFFIXES = (".json", ".safetensors", ".txt", ".model")  # of a model's folder


def files_of_model(key: str, folder: Path) -> dict[str, Path]:
    """Returns the descriptions, weights and vocabularies in a model's folder and those below it.

    Args:
      key: the setting that names the folder.
      folder: the folder.
    """
    paths = sorted((*folder.glob("*"), *folder.glob("*/*")))
    return {
        f"{key}/{path.relative_to(folder).as_posix()}": path
        for path in paths
        if path.suffix in _SUFFIXES and path.is_file()
    }


def digest(path: Path) -> str:
    """Returns the SHA-256 of a file; above 64 MiB, that of its size, first MiB and last MiB."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= LARGE:
            return hashlib.file_digest(file, "sha256").hexdigest()
        found = hashlib.sha256(str(size).encode())
        found.update(file.read(_END))
        file.seek(-_END, os.SEEK_END)
        found.update(file.read())
    return found.hexdigest()


def write_inputs(path: Path, files: Mapping[str, Path]) -> None:
    """Writes the digests of files, and keeps those that the file holds of others.

    Args:
      path: the file to write.
      files: name -> file.
    """
    digests = _read(path) | {name: digest(file) for name, file in files.items()}
    write_atomic(path, json.dumps(digests, indent=1, sort_keys=True).encode())


def changed_inputs(path: Path, files: Mapping[str, Path]) -> list[str]:
    """Returns the names of files whose content is not what `write_inputs` saw.

    Args:
      path: what `write_inputs` wrote; a run of an older version has none, and nothing is compared.
      files: name -> file. A name that only one side has is left out.
    """
    stored = _read(path)
    return [name for name, file in files.items() if name in stored and digest(file) != stored[name]]


def same_content(path: Path, key: str, files: Mapping[str, Path]) -> bool:
    """Returns whether the files that a setting names are those that `write_inputs` saw.

    Args:
      path: what `write_inputs` wrote.
      key: the setting, such as `model.path`.
      files: name -> file, of all settings.
    """
    here = {name: digest(file) for name, file in _of(key, files).items()}
    return bool(here) and here == _of(key, _read(path))


def _of(key: str, named: Mapping[str, T]) -> dict[str, T]:
    """The entries that belong to a setting."""
    return {
        name: value
        for name, value in named.items()
        if name == key or name.startswith((f"{key}[", f"{key}/"))
    }


def _read(path: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads(path.read_text()) if path.is_file() else {}
    return found
