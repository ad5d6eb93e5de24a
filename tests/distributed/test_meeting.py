"""Processes that wait for each other: who is missing is named, and models are loaded in turn."""

import re

import pytest
from support.launching import launch

from flowgrpo_rc.distributed.memory import free_host_gib

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
import os, socket, sys, time, torch
from pathlib import Path
from accelerate import Accelerator
from flowgrpo_rc.distributed import processes as module

folder, machines, rounds, takes = Path(sys.argv[1]), *sys.argv[2:]
rank = int(os.environ["RANK"])
os.environ["LOCAL_WORLD_SIZE"] = str(machines.count(machines[rank]))
socket.gethostname = lambda: machines[rank]
module.free_host_gib = lambda: float(takes) * module.peak_memory_gib(torch.device("cpu"))
processes = module.Processes(Accelerator(cpu=True))
processes.device = torch.device("cuda")  # it is not used; on a CPU nobody waits
at_once = [r for r, number in enumerate(rounds) if number == rounds[rank]]
before = [r for r, number in enumerate(rounds) if number < rounds[rank]]
with processes.in_turn():
    (folder / f"came_{rank}").touch()
    came = {int(path.name.partition("_")[2]) for path in folder.glob("came_*")}
    assert came.issuperset(before) and came.issubset(before + at_once), came
    deadline = time.monotonic() + 60
    while not all((folder / f"came_{r}").exists() for r in at_once):
        assert time.monotonic() < deadline, "it loads alone"
    assert not [r for r in before if not (folder / f"left_{r}").exists()]
    (folder / f"left_{rank}").touch()
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


@pytest.mark.parametrize(
    ("machines", "rounds", "takes"),
    [("aaa", "012", "0.5"), ("aaaaa", "01122", "2.5"), ("aaa", "011", "9"), ("aab", "010", "1")],
)
def test_as_many_processes_load_at_once_as_their_machine_takes(tmp_path, machines, rounds, takes):
    """In rounds; `takes` is how many of the first process's size the free memory holds."""
    program = tmp_path / "in_turn.py"
    program.write_text(IN_TURN)
    launch(len(machines), str(program), str(tmp_path), machines, rounds, takes)
    assert len(list(tmp_path.glob("left_*"))) == len(machines)


@pytest.mark.parametrize(
    ("controllers", "limit", "used"),
    [("", "max", "current"), ("memory", "limit_in_bytes", "usage_in_bytes")],
)
def test_memory_is_free_within_the_limit_of_a_job(tmp_path, controllers, limit, used):
    """It may use 10 GiB and uses 6, of which 3 are a cache of files; the machine has 9 free."""
    job = tmp_path / "sys/fs/cgroup" / controllers / "job"
    (job / "step").mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemFree: 1 kB\nMemAvailable: {9 * 2**20} kB\n")
    (tmp_path / "proc/self/cgroup").write_text(f"4:{controllers}:/job/step\n")
    assert free_host_gib(tmp_path) == 9
    (job / f"memory.{limit}").write_text(f"{10 * 2**30}\n")
    (job / f"memory.{used}").write_text(f"{6 * 2**30}\n")
    cached = f"active_file {2**30}\ninactive_file {2 * 2**30}\nshmem 7\n"
    (job / "memory.stat").write_text(cached)
    assert free_host_gib(tmp_path) == 7
    (job / f"memory.{limit}").write_text("max\n")
    assert free_host_gib(tmp_path) == 9
