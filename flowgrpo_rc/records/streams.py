"""Standard streams that outlive their reader: a run goes on when nobody takes what it prints."""

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO


@contextmanager
def lasting_streams() -> Iterator[None]:
    """Drops what cannot be written to the standard output and the standard error meanwhile.

    Nobody may read their pipe any more, their terminal may have closed, or they may be closed from
    the start. Streams that a program has put in their place stay as they are.
    """
    for number in range(3):
        _keep_open(number)
    before = sys.stdout, sys.stderr
    if sys.stdout is sys.__stdout__:
        sys.stdout = _lasting(1, sys.stdout)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _lasting(2, sys.stderr)
    try:
        yield
    finally:
        for stream in {sys.stdout, sys.stderr} - {*before}:
            stream.flush()
        sys.stdout, sys.stderr = before


class _Outlet(io.FileIO):
    """A file that drops what the system refuses to take."""

    def write(self, content: Any) -> int:
        taken = None
        with suppress(OSError):
            taken = super().write(content)
        # None, too, from a pipe that is full and would not wait.
        return memoryview(content).nbytes if taken is None else taken


def _lasting(number: int, stream: TextIO | None) -> TextIO:
    encoding = "utf-8"
    errors = "replace"
    if stream is not None:  # as it is if it was closed at the start
        encoding = stream.encoding
        errors = stream.errors or "strict"
        with suppress(OSError):
            stream.flush()
    buffer = io.BufferedWriter(_Outlet(number, "w", closefd=False))
    return io.TextIOWrapper(buffer, encoding=encoding, errors=errors, line_buffering=True)


def _keep_open(number: int) -> None:
    """Opens a standard file descriptor if it is closed, or the next file would take its number."""
    try:
        os.fstat(number)
    except OSError:
        os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
        os.set_inheritable(number, True)
