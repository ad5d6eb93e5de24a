"""Digests of what a run reads, so that it does not go on with other contents."""

import hashlib
import inspect
import json
import linecache
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.files import write_atomic
from flowgrpo_rc.pictures import picture_digest
from flowgrpo_rc.reading import read_mapping

T = TypeVar("T")
LARGE = 64 * 2**20  # bytes; a larger file is read in places
_BLOCK = 2**14  # bytes of a place
_NUM_BLOCKS = 256
_WEIGHTS = ".safetensors"
_SUFFIXES = (".json", ".jinja", _WEIGHTS, ".txt", ".model")  # of a model's folder


class Input(NamedTuple):
    """Where something is that a run reads, for messages, and a SHA-256 of its content."""

    path: str
    digest: str


def prompts_input(paths: Sequence[Path], prompts: Sequence[Prompt]) -> Input:
    """Returns the input of prompts as they were read from files, with the content of images."""
    digest = hashlib.sha256()
    for prompt in prompts:
        row: list[object] = [prompt.text, prompt.target, prompt.negative_text, prompt.metadata]
        if prompt.images:
            row.append([picture_digest(image) for image in prompt.images])
        if prompt.messages:
            row.append(prompt.messages)
        digest.update(json.dumps(row, sort_keys=True, default=str).encode())
    return Input(", ".join(map(str, paths)), digest.hexdigest())


def model_inputs(key: str, folder: Path) -> dict[str, Input]:
    """Returns the descriptions, weights and vocabularies in the folder that a setting names."""
    paths = sorted((*folder.glob("*"), *folder.glob("*/*")))
    return {
        f"{key}/{path.relative_to(folder).as_posix()}": file_input(path)
        for path in paths
        if path.suffix in _SUFFIXES and path.is_file()
    }


def file_input(path: Path) -> Input:
    """Returns the input of a file.

    Its digest is that of all bytes; above 64 MiB, that of its size and of 256 blocks of 16 KiB,
    spread evenly from the first to the last.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= LARGE:
            return Input(str(path), hashlib.file_digest(file, "sha256").hexdigest())
        digest = hashlib.sha256(str(size).encode())
        for number in range(_NUM_BLOCKS):
            file.seek((size - _BLOCK) * number // (_NUM_BLOCKS - 1))
            digest.update(file.read(_BLOCK))
    return Input(str(path), digest.hexdigest())


def code_input(key: str, code: object) -> dict[str, Input]:
    """Returns the input of a function or class, by its source; {} if it has none here."""
    try:
        place = str(inspect.getsourcefile(code))  # type: ignore[arg-type]
        # Of code that was executed from a text, Python would read lines of another file.
        if not Path(place).is_file() and place not in linecache.cache:
            return {}
        source = inspect.getsource(code)  # type: ignore[arg-type]
    except (OSError, TypeError):
        return {}
    name = f"{code.__module__}.{code.__qualname__}"  # type: ignore[attr-defined]
    return {key: Input(name, hashlib.sha256(source.encode()).hexdigest())}


def write_inputs(path: Path, inputs: Mapping[str, Input]) -> None:
    """Writes the digests of inputs, beside those that the file holds of others."""
    digests = _read(path) | {name: entry.digest for name, entry in inputs.items()}
    write_atomic(path, json.dumps(digests, indent=1, sort_keys=True).encode())


def changed_inputs(path: Path, inputs: Mapping[str, Input]) -> list[str]:
    """Returns what is no longer as `write_inputs` saw it, in words; nothing without its file.

    An input that only one side has is left out: more of a model may have been fetched, or it is
    still to be fetched. Only, all weights of a folder may not become others.
    """
    stored = _read(path)
    changed = [
        f"{name}: the content of {entry.path} has changed"
        for name, entry in inputs.items()
        if name in stored and entry.digest != stored[name]
    ]
    weights = _weights(inputs)
    gone = [
        f"{folder}: the weights that the run began with are gone, and others are there"
        for folder in sorted(_weights(stored))
        if folder in weights and weights[folder].isdisjoint(stored)
    ]
    return changed + gone


def same_content(path: Path, key: str, inputs: Mapping[str, Input]) -> bool:
    """Returns whether what a setting such as `model.path` names is what `write_inputs` saw."""
    digests = {name: entry.digest for name, entry in of_setting(key, inputs).items()}
    return bool(digests) and digests == of_setting(key, _read(path))


def of_setting(key: str, named: Mapping[str, T]) -> dict[str, T]:
    """Returns the entries that belong to a setting."""
    return {
        name: value for name, value in named.items() if name == key or name.startswith(f"{key}/")
    }


def _weights(names: Iterable[str]) -> dict[str, set[str]]:
    """Returns the names of files of weights by folder."""
    files_of: dict[str, set[str]] = {}
    for name in names:
        if name.endswith(_WEIGHTS):
            files_of.setdefault(name.rpartition("/")[0], set()).add(name)
    return files_of


def _read(path: Path) -> dict[str, str]:
    return read_mapping(path) if path.is_file() else {}
