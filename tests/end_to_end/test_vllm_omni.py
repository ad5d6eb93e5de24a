"""The vLLM-Omni engine with a child process that answers as the test says."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from support.engine_children import HONEST, gone

from flowgrpo_rc.models.lora import lora_parameters
from flowgrpo_rc.rollout import vllm_omni_engine
from flowgrpo_rc.rollout.engine import EngineError

TRAINER = """
import os, sys, time
from flowgrpo_rc.rollout.vllm_omni.process import EngineProcess
from flowgrpo_rc.rollout.vllm_omni_engine import COMMAND
child = EngineProcess(COMMAND, os.environ, timeout_s=60)
print(child.pid, flush=True)
time.sleep(60)
"""


def test_the_real_child_ends_when_the_trainer_is_killed(tmp_path):
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert trainer.stdout is not None
    pid = int(trainer.stdout.readline())
    assert not gone(pid, seconds=0.2)
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    trainer.stdout.close()
    assert gone(pid)
    assert not list(tmp_path.iterdir())


def test_the_command_line_reports_the_engine_and_fails(
    train, fake_engine, script, monkeypatch, capsys
):
    command = script("print('no driver'); raise SystemExit(3)")
    monkeypatch.setattr(vllm_omni_engine, "COMMAND", command)
    assert train("rollout.name=vllm_omni") == 1
    error = capsys.readouterr().err
    assert error.startswith("error: the vLLM-Omni engine (process ")
    assert "its exit status is 3" in error
    assert "no driver" in error


@pytest.fixture
def state(model, fake_engine):
    """A LoRA to push."""
    return {name: p.detach() + 1 for name, p in lora_parameters(model.network).items()}


def test_an_engine_that_binds_what_was_pushed(fake_engine, state):
    engine = fake_engine(HONEST)
    engine.sync_weights(state, 1)
    with pytest.raises(ValueError, match="other tensors than the trainer's"):
        engine.sync_weights(dict(list(state.items())[1:]), 2)
    child = engine._process
    engine.close()
    engine.close()
    assert gone(child.pid)
    assert child.log is None


STALE = 'send(connection, "done", first if count > 1 else (first := held), {})'
COUNTED = 'send(connection, "done", held | {"quantized": QUANTIZED, "layers": 15}, {})'


def test_an_engine_with_other_weights_is_caught(fake_engine, state):
    with pytest.raises(EngineError, match=r"does not hold the LoRA of step 1: it bound 15 of 15 m"):
        fake_engine(STALE).sync_weights(state, 1)


@pytest.mark.slow
def test_an_engine_that_ignores_its_quantization_is_caught(fake_engine):
    message = r"ignored rollout\.engine_kwargs\.quantization=fp8: none of the 15 layers"
    with pytest.raises(EngineError, match=message):
        fake_engine(COUNTED.replace("QUANTIZED", "0"), quantization="fp8")
    fake_engine(COUNTED.replace("QUANTIZED", "12"), quantization="fp8").close()
