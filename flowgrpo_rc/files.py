"""Writes files whole or not at all."""

import os
from pathlib import Path
from typing import Any

import yaml

TEMPORARY = ".tmp"  # how names of files end that are not complete


def write_atomic(path: Path, content: bytes) -> None:
    """Writes a file such that a crash leaves either the old content or the new one.

    Folders on its way are made. Raises OSError, which names the file, if the disk refuses it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}{TEMPORARY}")
    try:
        # Somebody else's folder may hold a link of this name to a file of ours.
        temporary.unlink(missing_ok=True)
        with temporary.open("xb") as file:
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
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def plain_yaml(path: Path) -> dict[str, Any]:
    """Reads a mapping from a YAML file that this package has written.

    Such a file has no aliases (`*name`), a few of which may stand for billions of values.
    """
    try:
        text = path.read_text(encoding="utf-8")
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text)):
            raise ValueError("it has YAML aliases")
        tree = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict):
        raise ValueError(f"{path} is damaged: it holds no mapping")
    return tree
