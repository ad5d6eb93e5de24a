"""Files with one JSON object a line: metrics.jsonl and its siblings."""

import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flowgrpo_rc.files import write_atomic
from flowgrpo_rc.reading import parse_mapping

Row = dict[str, Any]  # of a file with one JSON object a line; `step` is an int
LAST_STEP = 10**6  # the pages keep a column for each step up to the last


class MetricsFile:
    """Rows of names and numbers, one JSON object a line.

    It also serves health.jsonl, whose rows hold a message, and rejected.jsonl, whose rows hold
    texts and lists. Every row reaches the disk before `append` returns. A value that is not finite
    is written as null, since JSON has no NaN. The next reader or writer drops a line torn by a
    kill.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, step: int, values: Mapping[str, object]) -> None:
        """Adds the row of a step. Raises OSError, naming the file, if the disk refuses it."""
        row = as_json({"step": step, **values})
        line = json.dumps(row, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"
        with self._writing():
            self._drop_torn_line()
            with self.path.open("ab") as file:
                file.write(line.encode())
                file.flush()
                os.fsync(file.fileno())

    def rows(self) -> list[Row]:
        """Returns all rows; [] without a file. ValueError if a line before the last is damaged."""
        return [row for row, _ in self._lines()]

    def numbers(self) -> list[Row]:
        """Returns all rows of a file whose values are numbers or null; ValueError for others."""
        rows = self.rows()
        for row in rows:
            wrong = [name for name, value in row.items() if not _is_number(value)]
            if wrong or not 0 <= row["step"] <= LAST_STEP:
                what = f"{(*wrong, 'step')[0]} of step {row['step']}"
                why = f"is no finite number and not null, or no step of 0 to {LAST_STEP}"
                raise ValueError(f"{self.path} is damaged: {what} {why}")
        return rows

    def missing(self, last: int) -> list[int]:
        """Returns the steps from 1 to `last` that have no row."""
        return sorted(set(range(1, last + 1)) - {row["step"] for row in self.rows()})

    def truncate_after(self, step: int) -> None:
        """Drops the rows of later steps and a torn last line, in one step or not at all."""
        if not self.path.exists():
            return
        lines = b"".join(line + b"\n" for row, line in self._lines() if row["step"] <= step)
        with self._writing():
            write_atomic(self.path, lines)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            why = f"cannot write the metrics of this run ({error.strerror})"
            raise OSError(error.errno, why, str(self.path)) from error

    def _lines(self) -> list[tuple[Row, bytes]]:
        lines = self.path.read_bytes().split(b"\n") if self.path.exists() else [b""]
        # After the last newline comes nothing, or a torn line.
        complete = [line for line in lines[:-1] if line.strip()]
        parsed = [(_parse(line), line) for line in complete]
        whole = [(row, line) for row, line in parsed if row is not None]
        # A kill may leave a damaged line at the end alone.
        if damaged := [line for row, line in parsed[:-1] if row is None]:
            number = lines.index(damaged[0]) + 1
            raise ValueError(
                f"{self.path}, line {number}: not a JSON object with a 'step'; the file is damaged"
            )
        return whole

    def _drop_torn_line(self) -> None:
        if not self.path.is_file() or self.path.stat().st_size == 0:
            return
        # Only the last byte is read, since the file may be large.
        with self.path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            if file.read(1) == b"\n":
                return
        os.truncate(self.path, self.path.read_bytes().rfind(b"\n") + 1)


def held_out(row: Mapping[str, float]) -> dict[str, float]:
    """Returns the held-out metrics of a row, by their names without `val/`."""
    return {name[4:]: value for name, value in row.items() if name.startswith("val/")}


def as_json(value: Any) -> Any:
    """Returns what JSON can hold: None for a number that is not finite, at any depth."""
    if isinstance(value, Mapping):
        return {name: as_json(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    if value is None or isinstance(value, str | int):
        return value
    return float(value) if math.isfinite(value) else None


def _parse(line: bytes) -> Row | None:
    try:
        row = parse_mapping(line)
    except ValueError:
        return None
    return row if isinstance(row.get("step"), int) else None


def _is_number(value: object) -> bool:
    # An integer may be beyond every float, and 1e999 is infinite.
    return value is None or (isinstance(value, int | float) and abs(value) <= sys.float_info.max)
