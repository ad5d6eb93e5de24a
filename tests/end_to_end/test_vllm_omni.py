"""The vLLM-Omni engine with a child process that answers as the test says."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
import torch
from support.engine_children import FAKE, HONEST, gone
from support.image_rollouts import make_spec

from flowgrpo_rc.batch import Prompt, PromptBatch
from flowgrpo_rc.models.lora import lora_parameters
from flowgrpo_rc.rollout import vllm_omni_engine
from flowgrpo_rc.rollout.engine import EngineError, ImageRequest
from flowgrpo_rc.rollout.vllm_omni.process import EngineProcess

TRAINER = """
import os, sys, time
from flowgrpo_rc.rollout.vllm_omni.process import EngineProcess
from flowgrpo_rc.rollout.vllm_omni_engine import COMMAND
child = EngineProcess(COMMAND, os.environ, timeout_s=60)
print(child.pid, flush=True)
time.sleep(60)
"""


def test_close_is_orderly_and_may_be_repeated(script):
    child = EngineProcess(script(FAKE.replace("ANSWER", HONEST)), os.environ, timeout_s=60)
    assert [reply.kind for reply in child.ask("start", {})] == ["done"]
    child.close()
    child.close()
    assert gone(child.pid)
    assert child.log is None


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


def test_the_real_child_survives_a_request_that_fails():
    child = EngineProcess(vllm_omni_engine.COMMAND, os.environ, timeout_s=60)
    with pytest.raises(EngineError, match="failed in 'sync': "):
        list(child.ask("sync", {}))
    child.close()


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
    engine.close()


NOTHING = 'send(connection, "done", {"modules": 0, "fingerprint": fingerprint({})}, {})'
STALE = 'send(connection, "done", first if count > 1 else (first := held), {})'


@pytest.mark.parametrize(
    ("answer", "message"),
    [(NOTHING, "step 0: it bound 0 of"), (STALE, "step 1: it bound 15 of 15 modules")],
    ids=["nothing bound", "stale"],
)
def test_an_engine_with_other_weights_is_caught(fake_engine, state, answer, message):
    with pytest.raises(EngineError, match=rf"does not hold the LoRA of {message}"):
        fake_engine(answer).sync_weights(state, 1)


COUNTED = 'send(connection, "done", held | {"quantized": QUANTIZED, "layers": 15}, {})'


def test_an_engine_that_ignores_its_quantization_is_caught(fake_engine):
    message = r"ignored rollout\.engine_kwargs\.quantization=fp8: none of the 15 layers"
    with pytest.raises(EngineError, match=message):
        fake_engine(COUNTED.replace("QUANTIZED", "0"), quantization="fp8")
    fake_engine(COUNTED.replace("QUANTIZED", "12"), quantization="fp8").close()


# Answers with a conditioning and two chunks of a sample each, and then falls asleep.
SLEEPY = """
    if kind == "generate":
        import torch
        send(connection, "texts", {}, {"prompt_embeds": torch.zeros(1, 2, 3)})
        for _ in range(2):
            send(connection, "chunk", {"count": 1, "spec": {}}, {})
        time.sleep(0.3)
        open(sys.argv[0] + ".asleep", "w").close()
        tensors = bound
    else:
        bound = tensors
    held = {"modules": len(tensors) // 2, "fingerprint": fingerprint(tensors)}
    send(connection, "done", held, {})
"""


def test_images_are_decoded_when_the_engine_sleeps(fake_engine, model, monkeypatch, tmp_path):
    """On a card with little room, decoding and the engine's weights do not fit together."""
    engine = fake_engine(SLEEPY.strip())
    asleep = []
    mark = tmp_path / "child.py.asleep"
    monkeypatch.setattr(vllm_omni_engine, "_trajectory", lambda *_: None)
    monkeypatch.setattr(vllm_omni_engine, "SamplerSpec", dict)
    monkeypatch.setattr(
        vllm_omni_engine, "image_chunk", lambda *_, **__: asleep.append(mark.exists())
    )
    request = ImageRequest(
        prompts=PromptBatch(step=1, prompts=[Prompt(text='"AB"', index=0)], slots=[0]),
        samples_per_prompt=2,
        spec=make_spec("sde", 1.0),
        window=torch.arange(4).expand(2, 4),
        seeds=[1, 2],
    )
    for sleeps, wanted in ((True, [True, True]), (False, [False, False])):
        mark.unlink(missing_ok=True)
        asleep.clear()
        engine._sleeps = sleeps
        list(engine._sampled(request, 0))
        assert asleep == wanted
    engine.close()
