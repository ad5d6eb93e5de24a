"""Workers of one machine load one after the other, where their models are on the way to a GPU."""

from __future__ import annotations

from pathlib import Path

from support.launching import run_alone
from support.ray import needs_ray

PROGRAM = """
import os, sys, time
from functools import partial
from pathlib import Path
from accelerate import Accelerator
from flowgrpo_rc.distributed.processes import Processes
from flowgrpo_rc.workers.cluster import PoolSettings
from flowgrpo_rc.workers.start import start_workers


def load(folder):
    start = time.monotonic()
    time.sleep(1)
    Path(folder, f"loaded_{os.getpid()}").write_text(f"{start} {time.monotonic()}")


settings = PoolSettings(
    num_workers=2, num_cpus=1, num_gpus=0, timeout_s=60.0, max_restarts=0, staleness=0,
    chunk_size=1, in_turn=True,
)
engine = start_workers(
    partial(load, sys.argv[1]), settings, Processes(Accelerator(cpu=True)), address=None
)
while len(list(Path(sys.argv[1]).glob("loaded_*"))) < 2:
    time.sleep(0.02)
engine.close()
"""


@needs_ray
def test_workers_load_in_turn(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = run_alone(str(program), str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = sorted(
        tuple(map(float, path.read_text().split())) for path in tmp_path.glob("loaded_*")
    )
    assert first[1] <= second[0]
