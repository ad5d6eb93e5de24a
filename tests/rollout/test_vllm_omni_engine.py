"""VllmOmniEngine and its process without vLLM-Omni: the protocol, the environment, options,
crashes, hangs, weights.

Scripts stand in for the child. What the real engine does is tested in vllm_omni_real/.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from torch import Tensor

from flowgrpo_rc.core.random import normal
from flowgrpo_rc.models.base import FlowModel, ModelConfig
from flowgrpo_rc.models.lora import add_lora, lora_parameters
from flowgrpo_rc.rollout import vllm_omni_engine
from flowgrpo_rc.rollout.engine import EngineError
from flowgrpo_rc.rollout.vllm_omni.channel import receive, send
from flowgrpo_rc.rollout.vllm_omni.lora import fingerprint, weights_to_bind
from flowgrpo_rc.rollout.vllm_omni.process import EngineProcess, child_environment
from flowgrpo_rc.rollout.vllm_omni_engine import VllmOmniEngine

CPU = torch.device("cpu")
# Answers to every request by the code in `answer`, with the request's kind and tensors at hand.
FAKE = """
import json, os, sys, time
from multiprocessing.connection import Connection
from safetensors.torch import load
from flowgrpo_rc.rollout.vllm_omni.channel import receive, send
from flowgrpo_rc.rollout.vllm_omni.lora import fingerprint
connection = Connection(int(sys.argv[1]))
count = 0
while True:
    kind, fields, tensors = receive(connection)
    if kind == "close":
        break
    count += kind == "sync"
    held = {"modules": len(tensors) // 2, "fingerprint": fingerprint(tensors)}
    ANSWER
"""
HONEST = 'send(connection, "done", held, {})'


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], tuple[str, ...]]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # logs of failed children stay

    def write(code: str) -> tuple[str, ...]:
        path = tmp_path / "child.py"
        path.write_text(code)
        return sys.executable, str(path)

    return write


@pytest.fixture
def fake_engine(
    script: Callable[[str], tuple[str, ...]],
    model: FlowModel,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> Callable[[str], VllmOmniEngine]:
    """An engine whose child answers by the given code."""
    (tmp_path / "vllm_omni").mkdir()
    (tmp_path / "vllm_omni" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    network = add_lora(model, ModelConfig(lora_rank=4, lora_alpha=8), seed=0)

    def make(answer: str) -> VllmOmniEngine:
        monkeypatch.setattr(vllm_omni_engine, "COMMAND", script(FAKE.replace("ANSWER", answer)))
        return VllmOmniEngine(model, network, dtype="bf16", chunk_size=2, timeout_s=60)

    return make


# --- Messages


@pytest.fixture
def pair() -> Iterator[tuple[Connection, Connection]]:
    ends = [Connection(end.detach()) for end in socket.socketpair()]
    yield ends[0], ends[1]
    for end in ends:
        end.close()


def test_a_message_arrives_as_it_was_sent(pair):
    tensors = {
        "a": torch.randn(2, 3).bfloat16(),
        "b": torch.tensor([2**62, -1]),
        "c": torch.zeros(0, 4),
        "view": torch.arange(6).reshape(2, 3).T,
    }
    fields = {"seeds": [2**62 + 1], "text": 'a "§"', "none": None}
    send(pair[0], "generate", fields, tensors)
    found = receive(pair[1])
    assert (found.kind, found.fields) == ("generate", fields)
    assert found.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found.tensors[name].dtype == tensor.dtype
        assert torch.equal(found.tensors[name], tensor)


class Intruder:
    def __reduce__(self):
        return (os.mkdir, ("unpickled",))


def test_nothing_is_unpickled(pair, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pair[0].send_bytes(pickle.dumps(Intruder()))
    with pytest.raises(UnicodeDecodeError):
        receive(pair[1])
    pair[0].send_bytes(b'{"kind": "chunk", "fields": {}}')
    pair[0].send_bytes(pickle.dumps(Intruder()))
    with pytest.raises(SafetensorError):
        receive(pair[1])
    assert not Path("unpickled").exists()


# --- The environment of the child


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
    found = child_environment(launcher | kept, CPU, 1)
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


# --- Options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size=0: give at least 1"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size has no effect on cpu: it is for GPUs"),
        ({"sleep": True}, "sleep has no effect on cpu: it is for GPUs"),
        ({"memory_fraction": 0.4}, "memory_fraction has no effect on cpu: it is for GPUs"),
        ({"memory_fraction": 1.5}, r"memory_fraction=1\.5: give a number above 0 and at most 1"),
        (
            {"quantization": "fp8"},
            "quantization='fp8': vLLM-Omni does not quantize a StableDiffusion3Pipeline",
        ),
        (
            {"attention_backend": "FLASH"},
            "attention_backend='FLASH': allowed are TORCH_SDPA, FLASH_ATTN",
        ),
        ({"timeout_s": 0}, "timeout_s=0: give a number of seconds above 0"),
        ({"start_timeout_s": -1.0}, r"start_timeout_s=-1\.0: give a number of seconds above 0"),
        ({"timeout": 3}, r"timeout: unknown option \(did you mean 'timeout_s'\?\)"),
    ],
)
def test_wrong_options_fail_before_anything_is_loaded(train, capsys, options, message):
    given = [f"rollout.engine_kwargs.{name}={value}" for name, value in options.items()]
    assert train("rollout.name=vllm_omni", *given) == 2
    assert re.search(rf"rollout\.engine_kwargs.*{message}", capsys.readouterr().err)


SD3 = "StableDiffusion3Pipeline"


@pytest.mark.parametrize(
    ("options", "processes", "message"),
    [
        (
            {"tensor_parallel_size": 2},
            "2",
            "an engine of several GPUs takes a trainer of one process",
        ),
        (
            {"tensor_parallel_size": 2, "memory_fraction": 0.5},
            "1",
            "no effect with tensor_parallel_size=2",
        ),
    ],
)
def test_several_gpus_for_an_engine(monkeypatch, options, processes, message):
    monkeypatch.setenv("WORLD_SIZE", processes)
    with pytest.raises(ValueError, match=message):
        VllmOmniEngine.check(SD3, [], torch.device("cuda"), options)


@pytest.mark.parametrize(
    ("pipeline_class", "absent", "message"),
    [
        (
            "FluxPipeline",
            [],
            r"samples from StableDiffusion3Pipeline, QwenImagePipeline; model\.path is a Fl",
        ),
        (
            SD3,
            ["image_encoder", "text_encoder_3"],
            r"needs every text encoder, and model\.path has no text_encoder_3",
        ),
    ],
)
def test_a_model_that_the_engine_cannot_sample(pipeline_class, absent, message):
    with pytest.raises(ValueError, match=message):
        VllmOmniEngine.check(pipeline_class, absent, CPU, {})


@pytest.mark.skipif(find_spec("vllm_omni") is not None, reason="vLLM-Omni is installed")
def test_the_missing_package_is_named(train, capsys):
    assert train("rollout.name=vllm_omni") == 1
    assert "pip install 'flowgrpo_rc[vllm-omni]'" in capsys.readouterr().err


# --- Crashes and hangs


def gone(pid: int, seconds: float = 20) -> bool:
    """The process has ended, or is a zombie that nobody has waited for yet."""
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


def test_the_command_line_reports_the_engine_and_fails(
    train, fake_engine, script, monkeypatch, capsys
):
    monkeypatch.setattr(
        vllm_omni_engine, "COMMAND", script("print('no driver'); raise SystemExit(3)")
    )
    assert train("rollout.name=vllm_omni") == 1
    error = capsys.readouterr().err
    assert error.startswith("error: the vLLM-Omni engine (process ")
    assert "its exit status is 3" in error
    assert "no driver" in error


# --- The LoRA in the engine


def lora(seed: int) -> dict[str, Tensor]:
    shapes = {"b.0.to_q.lora_A.default.weight": (4, 6), "b.0.to_q.lora_B.default.weight": (5, 4)}
    return {name: normal(shape, [seed], name)[0] for name, shape in shapes.items()}


def test_the_engine_gets_scaled_weights_in_its_precision():
    state = lora(1)
    found = weights_to_bind(state, adapter="default", scale=2.0, dtype=torch.bfloat16)
    assert sorted(found) == ["b.0.to_q.lora_A.weight", "b.0.to_q.lora_B.weight"]
    assert torch.equal(
        found["b.0.to_q.lora_A.weight"], state["b.0.to_q.lora_A.default.weight"].bfloat16()
    )
    assert torch.equal(
        found["b.0.to_q.lora_B.weight"], (2 * state["b.0.to_q.lora_B.default.weight"]).bfloat16()
    )


def test_the_fingerprint_is_that_of_names_types_shapes_and_bytes():
    tensors = {"b": torch.arange(4.0), "a": torch.ones(1, 2, dtype=torch.bfloat16)}
    expected = hashlib.sha256(
        b"a torch.bfloat16 (1, 2)\n" + b"\x80\x3f" * 2 + b"b torch.float32 (4,)\n"
    )
    expected.update(tensors["b"].numpy().tobytes())
    assert fingerprint(tensors) == expected.hexdigest()
    assert fingerprint(dict(reversed(tensors.items()))) == expected.hexdigest()
    others = [
        {"b": tensors["b"]},
        {**tensors, "b": torch.arange(4.0).reshape(2, 2)},
        {**tensors, "c": torch.zeros(0)},
    ]
    assert len({fingerprint(t) for t in [tensors, *others]}) == 4


def test_an_engine_that_binds_what_was_pushed(fake_engine, model):
    engine = fake_engine(HONEST)
    state = {name: p.detach() + 1 for name, p in lora_parameters(model.network).items()}
    engine.sync_weights(state, 1)
    with pytest.raises(
        ValueError, match=r"other tensors than the trainer's, among them \['transformer_blocks"
    ):
        engine.sync_weights(dict(list(state.items())[1:]), 2)
    engine.close()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            'send(connection, "done", {"modules": 0, "fingerprint": fingerprint({})}, {})',
            "step 0: it bound 0 of",
        ),
        (
            'send(connection, "done", first if count > 1 else (first := held), {})',
            "step 1: it bound 31 of 31 modules",
        ),
    ],
    ids=["nothing bound", "stale"],
)
def test_an_engine_with_other_weights_is_caught(fake_engine, model, answer, message):
    state = {name: p.detach() + 1 for name, p in lora_parameters(model.network).items()}
    with pytest.raises(EngineError, match=rf"does not hold the LoRA of {message}"):
        fake_engine(answer).sync_weights(state, 1)
