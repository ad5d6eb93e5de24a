"""The engine's process: its environment, crashes, hangs and its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from support.engine_children import FAKE, HONEST

from flowgrpo_rc.rollout import vllm_omni_engine
from flowgrpo_rc.rollout.engine import EngineError
from flowgrpo_rc.rollout.vllm_omni.process import EngineProcess, child_environment


def test_launcher_variables_do_not_reach_the_child():
    launcher = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "ROLE_RANK": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "x",
        "ACCELERATE_USE_CPU": "true",
        "SLURM_PROCID": "3",
        "OMPI_COMM_WORLD_RANK": "1",
        "WANDB_API_KEY": "secret",
    }
    kept = {
        "PATH": "/bin",
        "HF_HOME": "/models",
        "OMP_NUM_THREADS": "1",
        "VLLM_LOGGING_LEVEL": "DEBUG",
    }
    found = child_environment(launcher | kept, torch.device("cpu"), 1)
    assert found == kept | {"VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


@pytest.mark.parametrize(
    ("before", "index", "gpus", "visible"),
    [("4,5,6", 1, 1, "5"), ("GPU-a,GPU-b", 0, 1, "GPU-a"), ("4,5,6", 0, 2, "4,5,6")],
)
def test_a_child_sees_the_gpu_of_its_trainer(monkeypatch, before, index, gpus, visible):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", before)
    found = child_environment(os.environ, torch.device("cuda", index), gpus)
    assert found["CUDA_VISIBLE_DEVICES"] == visible
    assert "VLLM_TARGET_DEVICE" not in found


def gone(pid: int, seconds: float = 20) -> bool:
    """Says whether the process has ended, or is a zombie that nobody has waited for yet."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


SAY_ERROR = FAKE.replace("ANSWER", 'send(connection, "error", {"error": "KeyError: 7"}, {})')


@pytest.mark.parametrize(
    ("code", "message", "timeout_s"),
    [
        ("print('out of memory'); raise SystemExit(3)", "its exit status is 3.*out of memory", 60),
        (
            "import os; print('bye', flush=True); os.kill(os.getpid(), 9)",
            "signal SIGKILL ended it.*bye",
            60,
        ),
        (
            "raise RuntimeError('no such kernel')",
            "its exit status is 1.*RuntimeError: no such kernel",
            60,
        ),
        (
            "import time; print('waiting', flush=True); time.sleep(60)",
            "has not answered 'start' for 4 s.*waiting",
            4,
        ),
        (
            "import os, sys, time; os.write(int(sys.argv[1]), b'\\0\\0'); time.sleep(60)",
            "broke off while it worked",
            4,
        ),
        (SAY_ERROR, "failed in 'start': KeyError: 7", 60),
    ],
)
def test_a_crash_or_hang_is_reported_with_its_log(script, code, message, timeout_s):
    child = EngineProcess(script(code), os.environ, timeout_s=timeout_s)
    with pytest.raises(EngineError, match=f"(?s){message}"):
        list(child.ask("start", {}))
    assert gone(child.pid)
    child.close()
    assert child.log.exists()


def test_a_child_that_reads_nothing_does_not_block_the_trainer(script):
    child = EngineProcess(script("import time; time.sleep(60)"), os.environ, timeout_s=1)
    with pytest.raises(EngineError, match="did not take the request 'sync'"):
        list(child.ask("sync", {}, {"lora": torch.zeros(1 << 22)}))
    assert gone(child.pid)
    child.close()


def test_what_the_child_started_ends_with_it(script, tmp_path):
    code = (
        "import subprocess, sys, time; "
        f"p = subprocess.Popen(['sleep', '60']); open({str(tmp_path / 'pid')!r}, "
        "'w').write(str(p.pid)); time.sleep(60)"
    )
    child = EngineProcess(script(code), os.environ, timeout_s=3)
    with pytest.raises(EngineError, match="has not answered"):
        list(child.ask("start", {}))
    assert gone(int((tmp_path / "pid").read_text()))
    child.close()


def test_close_is_orderly_and_may_be_repeated(script):
    child = EngineProcess(script(FAKE.replace("ANSWER", HONEST)), os.environ, timeout_s=60)
    assert [reply.kind for reply in child.ask("start", {})] == ["done"]
    child.close()
    child.close()
    assert gone(child.pid)
    assert not child.log.exists()


TRAINER = """
import os, sys, time
from flowgrpo_rc.rollout.vllm_omni.process import EngineProcess
from flowgrpo_rc.rollout.vllm_omni_engine import COMMAND
child = EngineProcess(COMMAND, os.environ, timeout_s=60)
print(child.pid, child.log, flush=True)
time.sleep(60)
"""


def test_the_real_child_ends_when_the_trainer_is_killed():
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    pid, log = trainer.stdout.readline().split()
    assert not gone(int(pid), seconds=0.2)
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    trainer.stdout.close()
    assert gone(int(pid))
    Path(log).unlink()


def test_the_real_child_survives_a_request_that_fails():
    child = EngineProcess(vllm_omni_engine.COMMAND, os.environ, timeout_s=60)
    with pytest.raises(
        EngineError, match="failed in 'sync': AssertionError: the first request starts the engine"
    ):
        list(child.ask("sync", {}))
    child.close()
