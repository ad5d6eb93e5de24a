"""Streams that drop what nobody takes, and leave alone what a program has put in their place."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.launching import launch_environment

from flowgrpo_rc.records.streams import lasting_streams

PROGRAM = """
import os, sys
from flowgrpo_rc.records.streams import lasting_streams
print("before")
with lasting_streams():
    print("\\u00e9", end="")
    print("error", file=sys.stderr)
print("after")
with lasting_streams():
    os.close(1)
    print("x" * 100_000)
    print("dropped", end="")
sys.exit(75)
"""


def test_everything_comes_in_order_and_in_its_encoding() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=launch_environment() | {"PYTHONIOENCODING": "latin-1"},
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (75, b"error\n")
    assert done.stdout.decode("latin-1") == "before\néafter\n"


def test_streams_of_a_program_stay(capsys: pytest.CaptureFixture) -> None:
    before = sys.stdout, sys.stderr
    with lasting_streams():
        assert (sys.stdout, sys.stderr) == before
        print("captured")
    assert capsys.readouterr().out == "captured\n"
