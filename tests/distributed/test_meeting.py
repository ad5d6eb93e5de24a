"""Processes that wait for each other: who is missing is named, and models are loaded in turn."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.launching import launch

MEETING = """
import os, signal, sys, time
from accelerate import Accelerator
from flowgrpo_rc.distributed.processes import ProcessLost, Processes

processes = Processes(Accelerator(cpu=True))
processes.meet("the start", 60.0)
if processes.rank == 0:  # torchrun, which notices a killed process too, may be the first to do so
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if processes.rank in (1, 2) and os.environ["FAILURE"] == "killed":
    os._exit(9)
if processes.rank == 1 and os.environ["FAILURE"] == "hangs":
    time.sleep(300)
if processes.rank == 1 and os.environ["FAILURE"] == "goes elsewhere":
    processes.wait()
try:
    processes.meet("the end of step 7", 1.0)
except ProcessLost as error:
    print(error, file=sys.stderr, flush=True)
    os._exit(3)
"""

IN_TURN = """
import sys, time, torch
from pathlib import Path
from accelerate import Accelerator
from flowgrpo_rc.distributed.processes import Processes

processes = Processes(Accelerator(cpu=True))
processes.device = torch.device("cuda")  # it is not used; on a CPU nobody waits
with processes.in_turn():
    start = time.monotonic()
    time.sleep(0.3)
    Path(sys.argv[1], str(processes.rank)).write_text(f"{start} {time.monotonic()}")
processes.wait()
processes.close()
"""


@pytest.mark.parametrize(
    ("failure", "missing"),
    [
        ("killed", "(missing at|lost before) the end of step 7: "),
        ("hangs", "missing at the end of step 7: process 1"),
        ("goes elsewhere", "missing at the end of step 7: process 1"),
    ],
)
def test_the_message_names_who_is_missing_and_where(tmp_path, monkeypatch, failure, missing):
    monkeypatch.setenv("FAILURE", failure)
    program = tmp_path / "meeting.py"
    program.write_text(MEETING)
    done = launch(3, str(program), code=None)
    assert done.returncode != 0
    assert "process 0 of 3 cannot reach another one" in done.stderr
    assert re.search(rf"\({missing}", done.stderr)


def test_processes_of_a_machine_load_one_after_the_other(tmp_path: Path) -> None:
    program = tmp_path / "in_turn.py"
    program.write_text(IN_TURN)
    launch(3, str(program), str(tmp_path))
    times = [tuple(map(float, (tmp_path / str(rank)).read_text().split())) for rank in range(3)]
    assert times[0][1] <= times[1][0]
    assert times[1][1] <= times[2][0]
