"""The engine's process: its environment, crashes, hangs and its end."""

from __future__ import annotations

import os

import pytest
import torch
from support.engine_children import FAKE, gone

from flowgrpo_rc.rollout.engine import EngineError
from flowgrpo_rc.rollout.vllm_omni.process import EngineProcess, child_environment


def test_launcher_variables_do_not_reach_the_child():
    torchrun = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK ROLE_RANK MASTER_ADDR"
    others = "MASTER_PORT TORCHELASTIC_RUN_ID ACCELERATE_USE_CPU SLURM_PROCID WANDB_API_KEY"
    launcher = dict.fromkeys([*torchrun.split(), *others.split(), "OMPI_COMM_WORLD_RANK"], "1")
    kept = {
        "PATH": "/bin",
        "HF_HOME": "/models",
        "OMP_NUM_THREADS": "1",
        "VLLM_LOGGING_LEVEL": "DEBUG",
    }
    growing = "max_split_size_mb:64,expandable_segments:True"  # which a pool that sleeps refuses
    allocator = {"PYTORCH_ALLOC_CONF": growing}
    found = child_environment(launcher | kept | allocator, torch.device("cpu"), 1)
    kept["PYTORCH_ALLOC_CONF"] = growing.replace("True", "False")
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


SAY_ERROR = FAKE.replace("ANSWER", 'send(connection, "error", {"error": "KeyError: 7"}, {})')


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("print('out of memory'); raise SystemExit(3)", "its exit status is 3.*out of memory"),
        ("import os; print('bye', flush=True); os.kill(os.getpid(), 9)", "SIGKILL ended it.*bye"),
        ("raise RuntimeError('no such kernel')", "status is 1.*RuntimeError: no such kernel"),
        ("import time; print('hm', flush=True); time.sleep(60)", "'start' for 2 s.*hm"),
        (
            "import os, sys, time; os.write(int(sys.argv[1]), b'\\0\\0'); time.sleep(60)",
            "broke off while it worked",
        ),
        (SAY_ERROR, "failed in 'start': KeyError: 7"),
    ],
)
def test_a_crash_or_hang_is_reported_with_its_log(script, code, message):
    timeout_s = 2 if "time.sleep(60)" in code else 60
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
        "import subprocess, sys, time; p = subprocess.Popen(['sleep', '60']); "
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(p.pid)); time.sleep(60)"
    )
    child = EngineProcess(script(code), os.environ, timeout_s=1)
    with pytest.raises(EngineError, match="has not answered"):
        list(child.ask("start", {}))
    assert gone(int((tmp_path / "pid").read_text()))
    child.close()
