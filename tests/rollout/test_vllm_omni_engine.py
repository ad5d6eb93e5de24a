"""VllmOmniEngine without vLLM-Omni: its options, and the weights that its child binds.

Scripts stand in for the child. The real engine is tested in vllm_omni_real/.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from flowgrpo_rc.models.base import adapters_by_pipeline
from flowgrpo_rc.rollout import vllm_omni_engine
from flowgrpo_rc.rollout.vllm_omni.channel import Message, fingerprint
from flowgrpo_rc.rollout.vllm_omni_engine import PIPELINES, REFUSED, VllmOmniEngine

CPU = torch.device("cpu")


GPU = torch.device("cuda")
SD3 = "StableDiffusion3Pipeline"


@pytest.mark.parametrize(
    ("device", "options", "message"),
    [
        (CPU, {"tensor_parallel_size": 0}, "tensor_parallel_size=0: give at least 1"),
        (CPU, {"tensor_parallel_size": 2}, "tensor_parallel_size has no effect on cpu: it is for"),
        (CPU, {"sleep": True}, "sleep has no effect on cpu: it is for GPUs"),
        (CPU, {"memory_fraction": 0.4}, "memory_fraction has no effect on cpu: it is for GPUs"),
        (CPU, {"memory_fraction": 1.5}, r"memory_fraction=1\.5: give a number above 0 and at most"),
        (CPU, {"attention_backend": "FLASH"}, "attention_backend='FLASH': allowed are TORCH_SDPA,"),
        (CPU, {"timeout_s": 0}, "timeout_s=0: give a number of seconds above 0"),
        (CPU, {"start_timeout_s": -1.0}, r"start_timeout_s=-1\.0: give a number of seconds"),
        (GPU, {"tensor_parallel_size": 2}, "takes a trainer of one process"),
        (GPU, {"tensor_parallel_size": 2, "memory_fraction": 0.5}, "with tensor_parallel_size=2"),
    ],
)
def test_wrong_options(monkeypatch, device, options, message):
    monkeypatch.setenv("WORLD_SIZE", "2" if "one process" in message else "1")
    with pytest.raises(ValueError, match=message):
        VllmOmniEngine.check(SD3, [], device, options)


@pytest.mark.parametrize(
    ("pipeline_class", "absent", "message"),
    [
        ("NewPipeline", [], r"WanPipeline; model\.path is a NewPipeline: set rollout\.name="),
        ("ZImagePipeline", [], r"a ZImagePipeline \(vLLM-Omni 0\.30 gives its prompts no mask"),
        ("FluxPipeline", ["text_encoder_2"], r"model\.path has no text_encoder_2"),
        (SD3, ["image_encoder", "text_encoder_3"], r"model\.path has no text_encoder_3"),
    ],
)
def test_a_model_that_the_engine_cannot_sample(pipeline_class, absent, message):
    with pytest.raises(ValueError, match=message):
        VllmOmniEngine.check(pipeline_class, absent, CPU, {})


@pytest.mark.parametrize("pipeline_class", PIPELINES)
def test_each_family_is_sampled_or_refused(pipeline_class):
    """Nothing else is checked about a family, so an engine of fp8 is refused for SD3 alone."""
    assert adapters_by_pipeline().keys() == PIPELINES.keys() | REFUSED.keys()
    options = {"quantization": "fp8"}
    if pipeline_class == SD3:
        with pytest.raises(ValueError, match=f"does not quantize a {SD3}, only QwenImagePipeline"):
            VllmOmniEngine.check(pipeline_class, [], CPU, options)
    else:
        with suppress(ImportError):
            VllmOmniEngine.check(pipeline_class, [], CPU, options)


@pytest.mark.parametrize("sleep", [True, False])
def test_memory_is_given_back_before_the_engine_wakes_up(monkeypatch, sleep):
    """Checks the order: an engine in another process cannot use what torch keeps for later."""
    done: list[str] = []

    class Child:
        def __init__(self, *_: object, **__: object) -> None:
            self.held = fingerprint({})

        def ask(self, kind: str, fields: dict, tensors=None, **_: object) -> Iterator[Message]:
            done.append(kind)
            if kind == "sync":
                self.held = fingerprint(tensors)
            reply = {"modules": 1, "fingerprint": self.held}
            return iter(
                [Message("encoded", {}, {}), Message("done", reply, {})][kind != "generate" :]
            )

    monkeypatch.setattr(vllm_omni_engine, "EngineProcess", Child)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("freed"))
    monkeypatch.setattr(VllmOmniEngine, "_question", lambda *_: ("generate", {}, {}))
    monkeypatch.setattr(vllm_omni_engine, "_conditioning", lambda *_: None)
    network = nn.ParameterDict({"lora_A": torch.ones(1), "lora_B": torch.ones(1)})
    network.peft_config = {"default": SimpleNamespace(lora_alpha=2, r=1)}
    pipeline = SimpleNamespace(name_or_path="folder")
    model = SimpleNamespace(pipeline=pipeline, pipeline_class=SD3, device=CPU)
    engine = VllmOmniEngine(model, network, dtype="fp32", chunk_size=1, sleep=sleep)
    request = SimpleNamespace(prompts=SimpleNamespace(prompts=[]), rows=lambda: range(1))
    assert list(engine.generate(request)) == []
    asked = ["start", "sync", "generate"]
    assert done == (["start", "freed", "sync", "freed", "generate"] if sleep else asked)
