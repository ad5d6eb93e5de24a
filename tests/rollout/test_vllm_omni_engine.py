"""VllmOmniEngine without vLLM-Omni: its options, and the weights that its child binds.

Scripts stand in for the child. The real engine is tested in vllm_omni_real/.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from support.engine_children import FAKE, HONEST

from flowgrpo_rc.models.base import FlowModel, ModelConfig
from flowgrpo_rc.models.lora import add_lora, lora_parameters
from flowgrpo_rc.rollout import vllm_omni_engine
from flowgrpo_rc.rollout.engine import EngineError
from flowgrpo_rc.rollout.vllm_omni_engine import VllmOmniEngine

CPU = torch.device("cpu")


@pytest.fixture
def fake_engine(
    script: Callable[[str], tuple[str, ...]],
    model: FlowModel,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> Callable[[str], VllmOmniEngine]:
    """Makes an engine whose child answers by the given code."""
    (tmp_path / "vllm_omni").mkdir()
    (tmp_path / "vllm_omni" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    network = add_lora(model, ModelConfig(lora_rank=4, lora_alpha=8), seed=0)

    def make(answer: str) -> VllmOmniEngine:
        monkeypatch.setattr(vllm_omni_engine, "COMMAND", script(FAKE.replace("ANSWER", answer)))
        return VllmOmniEngine(model, network, dtype="bf16", chunk_size=2, timeout_s=60)

    return make


# --- Messages


# --- The environment of the child


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
