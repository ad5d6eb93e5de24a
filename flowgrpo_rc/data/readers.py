"""Rows of prompt files: text, JSON lines and parquet.

The folders of flow_grpo and the columns of verl-omni are understood as well.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from flowgrpo_rc.plugins import install_hint

Row = Mapping[str, object]  # column -> value
# How the file names of a folder may go on after `train` or `test`.
_ENDINGS = (".txt", ".jsonl", "_metadata.jsonl", ".parquet")


def find_file(path: Path, split: str, key: str) -> Path:
    """Finds the prompt file of a dataset folder; a file is returned as it is.

    Folders of flow_grpo hold train.txt or train_metadata.jsonl, those of verl-omni train.parquet.

    Args:
      path: a folder, or a file.
      split: `train` or `test`, the beginning of the file name.
      key: the configuration key that the path comes from, for messages.

    Raises:
      ValueError: the folder has no such file, or several.
    """
    if not path.is_dir():
        return path
    found = _files(path, split)
    if len(found) == 1:
        return found[0]
    names = ", ".join(f"{split}{ending}" for ending in _ENDINGS)
    if found:
        raise ValueError(
            f"{key}: {path} has {', '.join(file.name for file in found)}: give one of these files"
        )
    below = sorted(
        folder.name for folder in path.iterdir() if folder.is_dir() and _files(folder, split)
    )
    hint = f"; the folders in it that have one: {', '.join(below)}" if below else ""
    raise ValueError(f"{key}: the folder {path} has none of {names}{hint}")


def _files(folder: Path, split: str) -> list[Path]:
    return [file for ending in _ENDINGS if (file := folder / f"{split}{ending}").is_file()]


def read_rows(file: Path, key: str) -> Iterator[tuple[str, Row]]:
    """Reads every row of a prompt file.

    Args:
      file: its ending says how to read it.
      key: the configuration key that the file comes from, for messages.

    Yields:
      (place, row): the place for messages, such as `line 3`, and the columns of one prompt.

    Raises:
      ValueError: the file does not exist, has an unknown ending, cannot be read, or is parquet and
        pyarrow is not installed.
    """
    if not file.is_file():
        kind = "file" if file.suffix else "file or folder"
        given = file if file.is_absolute() else f"{file} in {Path.cwd()}"
        raise ValueError(
            f"{key}: there is no {kind} {given}; give a prompt file ({', '.join(_READERS)}), or a "
            f"folder that has one of train and one of test"
        )
    if file.suffix not in _READERS:
        raise ValueError(f"{key}: {file} ends in {file.suffix!r}; allowed: {', '.join(_READERS)}")
    for place, row in _READERS[file.suffix](file, key):
        yield place, _without_chat(row, f"{key}: {file}, {place}")


def _without_chat(row: Row, where: str) -> Row:
    """Turns the columns of verl-omni into those of this project; leaves other rows as they are.

    A chat becomes the text of its user message. Its system message becomes metadata, since a
    pipeline has a template of its own. A ground truth that is a text becomes the target.
    """
    changed: dict[str, object] = dict(row)
    for column in ("prompt", "negative_prompt"):
        if isinstance(row.get(column), list):
            messages = _messages(row[column], f"{where}: {column}")
            changed[column] = messages.pop("user")
            if column == "prompt" and messages:
                changed["system_prompt"] = messages["system"]
    model = row.get("reward_model")
    if (
        "target" not in row
        and isinstance(model, dict)
        and isinstance(model.get("ground_truth"), str)
    ):
        changed["target"] = model["ground_truth"] or None
    return changed


def _messages(chat: Any, where: str) -> dict[str, str]:
    """The contents of a chat by role: one user message and at most one system message."""
    found: dict[str, str] = {}
    for message in chat:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise ValueError(
                f"{where} must be a text, or a chat of messages with a role and a text; got "
                f"{message!r}"
            )
        role = message.get("role")
        if role not in ("system", "user") or role in found:
            raise ValueError(
                f"{where} is a chat with {role!r} again or out of place: give one user message, "
                "and at most one system message"
            )
        found[role] = message["content"]
    if "user" not in found:
        raise ValueError(f"{where} is a chat without a user message")
    return found


def _read_txt(file: Path, key: str) -> Iterator[tuple[str, Row]]:
    for place, line in _lines(file, key):
        yield place, {"prompt": line}


def _read_jsonl(file: Path, key: str) -> Iterator[tuple[str, Row]]:
    for place, line in _lines(file, key):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{key}: {file}, {place}: not JSON ({error})") from error
        if not isinstance(row, dict):
            raise ValueError(
                f'{key}: {file}, {place}: must be an object such as {{"prompt": "..."}}, got {line}'
            )
        yield place, row


def _read_parquet(file: Path, key: str) -> Iterator[tuple[str, Row]]:
    try:
        from pyarrow import ArrowInvalid
        from pyarrow.parquet import read_table
    except ImportError as error:
        raise ValueError(
            f"{key}: reading {file} needs pyarrow: {install_hint('parquet')}"
        ) from error
    try:
        rows = read_table(file).to_pylist()
    except ArrowInvalid as error:
        raise ValueError(f"{key}: {file} is not a parquet file ({error})") from error
    for number, row in enumerate(rows, start=1):
        yield f"row {number}", row


_READERS: dict[str, Callable[[Path, str], Iterator[tuple[str, Row]]]] = {
    ".txt": _read_txt,
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
}


def _lines(file: Path, key: str) -> Iterator[tuple[str, str]]:
    """(place, stripped line) of every line; blank lines are allowed at the end of a file only."""
    try:
        lines = file.read_text(encoding="utf-8-sig").rstrip().split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{key}: {file} is not UTF-8 text ({error})") from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield f"line {number}", line.strip()
        elif len(lines) > 1:
            raise ValueError(
                f"{key}: {file}, line {number}: blank; blank lines may only end a file"
            )
