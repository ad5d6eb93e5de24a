"""Rows of prompt files: text, JSON lines and parquet.

The folders of flow_grpo and the columns of verl-omni are understood as well.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path

from flowgrpo_rc.plugins import check_packages, refuse
from flowgrpo_rc.reading import blaming, parse_mapping

logger = logging.getLogger(__name__)
Row = Mapping[str, object]  # column -> value
# How the file names of a folder may go on after `train` or `test`.
_ENDINGS = (".txt", ".jsonl", "_metadata.jsonl", ".parquet")


def find_file(path: Path, split: str, key: str) -> Path:
    """Finds the prompt file of a dataset folder; a file is returned as it is.

    Folders of flow_grpo hold train.txt or train_metadata.jsonl, those of verl-omni train.parquet.
    `split` is `train` or `test`. ValueError, with the configuration key, if the folder has no such
    file, or several.
    """
    if not path.is_dir():
        return path
    files = _files(path, split)
    if len(files) == 1:
        return files[0]
    names = ", ".join(file.name for file in files)
    fault = f"{path} has {names}: give one of these files"
    if not files:
        below = sorted(folder.name for folder in path.iterdir() if _files(folder, split))
        hint = f"; the folders in it that have one: {', '.join(below)}" if below else ""
        names = ", ".join(f"{split}{ending}" for ending in _ENDINGS)
        fault = f"the folder {path} has none of {names}{hint}"
    raise ValueError(f"{key}: {fault}")


def _files(folder: Path, split: str) -> list[Path]:
    return [file for ending in _ENDINGS if (file := folder / f"{split}{ending}").is_file()]


def read_rows(file: Path, key: str) -> Iterator[tuple[str, Row]]:
    """Reads every row of a prompt file; its ending says how.

    Yields:
      (place, row): the place for messages, such as `line 3`, and the columns of one prompt.

    Raises:
      ValueError: the file does not exist, has an unknown ending, cannot be read, or is parquet and
        pyarrow is not installed. The message names `key`, the configuration key.
    """
    kind = "file" if file.suffix else "file or folder"
    place = file if file.is_absolute() else f"{file} in {Path.cwd()}"
    allowed = ", ".join(_READERS)
    refuse(
        (not file.is_file(), f"there is no {kind} {place}"),
        (file.suffix not in _READERS, f"{file} ends in {file.suffix!r}; allowed: {allowed}"),
        about=f"{key}: ",
    )
    yield from _READERS[file.suffix](file, key)


def _read_txt(file: Path, key: str) -> Iterator[tuple[str, Row]]:
    for place, line in _lines(file, key):
        yield place, {"prompt": line}


def _read_jsonl(file: Path, key: str) -> Iterator[tuple[str, Row]]:
    for place, line in _lines(file, key):
        try:
            row = parse_mapping(line, unique=True)
        except ValueError as error:
            raise ValueError(
                f'{key}: {file}, {place} must be an object such as {{"prompt": "..."}}: {error}'
            ) from error
        yield place, row


def _read_parquet(file: Path, key: str) -> Iterator[tuple[str, Row]]:
    check_packages(f"{key}: reading {file}", ["pyarrow"], "parquet")
    from pyarrow import parquet

    with blaming(f"{key}: {file}"):
        rows = parquet.read_table(file).to_pylist()
    for number, row in enumerate(rows, start=1):
        yield f"row {number}", row


_READERS: dict[str, Callable[[Path, str], Iterator[tuple[str, Row]]]] = {
    ".txt": _read_txt,
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
}
PROMPT_FILES = tuple(_READERS)  # how their names end


def _lines(file: Path, key: str) -> Iterator[tuple[str, str]]:
    """Yields place and text of every line that is not blank."""
    try:
        lines = file.read_text(encoding="utf-8-sig").rstrip().split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{key}: {file} is not UTF-8 text ({error})") from error
    blank = [number for number, line in enumerate(lines, start=1) if not line.strip()]
    if blank and any(lines):
        _say_blank(f"{key}: {file}", blank[0], len(blank))
    for number, line in enumerate(lines, start=1):
        if line.strip():
            # A file that was appended to another one may begin with a mark of its own.
            yield f"line {number}", line.strip().removeprefix("\ufeff")


@cache  # a file is read several times
def _say_blank(where: str, first: int, count: int) -> None:
    lines = f"line {first} is" if count == 1 else f"{count} lines from line {first} on are"
    logger.warning("%s: %s blank and skipped", where, lines)
