"""VllmEngine on the real vLLM. Skipped unless vLLM is installed; runs on a CPU.

    bash tests/vllm_real/install.sh /tmp/vllm_venv
    /tmp/vllm_venv/bin/python -m pytest --noconftest -W ignore -s tests/vllm_real

The oracle is `TokenPolicy.evaluate`, the log-probabilities that the trainer itself computes with
transformers.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from bundled_models.build_tiny_adder_lm import build_tokenizer
from torch import Tensor
from vllm_real.read_interface import VERSION, interface

from flowgrpo_rc.batch import Prompt, PromptBatch, TokenBatch, TokenSpec
from flowgrpo_rc.core.random import derive_seed, normal
from flowgrpo_rc.models.base import ModelConfig
from flowgrpo_rc.models.causal_lm import CausalLM, load_causal_lm
from flowgrpo_rc.models.lora import add_lora, lora_parameters
from flowgrpo_rc.policies.token import TokenPolicy
from flowgrpo_rc.rollout import vllm_engine
from flowgrpo_rc.rollout.concat import concat
from flowgrpo_rc.rollout.engine import TextRequest
from flowgrpo_rc.rollout.vllm_engine import VllmEngine

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")

PROMPTS = ("1+1=", "37+58=", "998+7=")
SMALL = {"kv_cache_memory_bytes": 1 << 25, "enforce_eager": True, "max_model_len": 48}
BETWEEN_ENGINES_FP32 = 2e-5


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama whose heads (80 wide) vLLM's CPU attention can compute, with and without
    AMX.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("lm")
    tokenizer = build_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        head_dim=80,
        max_position_embeddings=64,
        initializer_range=0.15,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def config(checkpoint: Path) -> ModelConfig:
    return ModelConfig(kind="causal_lm", path=str(checkpoint), lora_rank=4, lora_alpha=8)


@pytest.fixture(scope="module")
def model(config: ModelConfig) -> CausalLM:
    loaded = load_causal_lm(config, torch.device("cpu"))
    add_lora(loaded, config, seed=0)
    return loaded


@pytest.fixture(scope="module")
def engine(model: CausalLM) -> Iterator[VllmEngine]:
    engine = VllmEngine(model, model.network, dtype="fp32", chunk_size=5, **SMALL)
    yield engine
    engine.close()


def test_recorded_interface_is_the_installed_one() -> None:
    import vllm

    root = Path(vllm.__path__[0])
    recorded = json.loads(
        (Path(__file__).parent / f"interface_{VERSION.replace('.', '_')}.json").read_text()
    )
    assert recorded == {"version": VERSION, **interface(lambda path: (root / path).read_text())}


def test_log_probs_are_those_of_the_trainer_under_every_lora(engine, model):
    differences = []
    for version in range(1, 4):
        put_lora(engine, model, version)
        batch = sample(engine, seed=version)
        assert set(batch.policy_version.tolist()) == {version}
        differences.append(mismatch(model, batch))
        assert differences[-1] < BETWEEN_ENGINES_FP32
    put_lora(engine, model, 0)
    batch = sample(engine)
    assert mismatch(model, batch) < BETWEEN_ENGINES_FP32
    set_lora(model, 1)
    stale = mismatch(model, batch)
    print(f"max |difference| fp32 {max(differences):.1e}; of another version's LoRA {stale:.2f}")
    assert stale > 0.1


def test_responses_end_with_the_end_token_or_at_the_limit(engine, model):
    put_lora(engine, model, 1)
    batch = sample(engine, per_prompt=32)
    eos = model.eos_ids[0]
    ended = 0
    for ids, mask in zip(batch.response_ids, batch.response_mask, strict=True):
        response = ids[mask].tolist()
        assert mask.tolist() == [True] * len(response) + [False] * (len(mask) - len(response))
        assert eos not in response[:-1]
        assert response[-1] == eos or len(response) == batch.spec.response_length
        ended += response[-1] == eos
    assert 0 < ended < len(batch)
    assert not batch.rollout_log_probs[~batch.response_mask].any()


def test_a_sample_follows_its_seed(engine: VllmEngine, model: CausalLM) -> None:
    put_lora(engine, model, 1)
    first = sample(engine, seed=1)
    again = sample(engine, seed=1)
    other = sample(engine, seed=2)
    assert torch.equal(first.response_ids, again.response_ids)
    assert first.response_ids.tolist() != other.response_ids.tolist()
    assert len({tuple(row) for row in first.response_ids[:8].tolist()}) > 1


def test_tokens_come_as_often_as_their_log_probs_say(engine: VllmEngine, model: CausalLM) -> None:
    put_lora(engine, model, 1)
    batch = sample(engine, per_prompt=2000, prompts=PROMPTS[:1], response_length=1)
    counts = torch.bincount(batch.response_ids[:, 0], minlength=15)
    logits = model.network(batch.prompt_ids[:1]).logits[0, -1]
    expected = torch.softmax(logits / batch.spec.temperature, -1) * len(batch)
    common = expected > 5
    chi_square = ((counts - expected) ** 2 / expected)[common].sum()
    print(f"chi square {chi_square:.1f} over {int(common.sum())} tokens")
    assert chi_square < 45  # 15 tokens at most: p < 1e-4


def test_adapter_that_binds_nothing_is_refused(engine, monkeypatch):
    engine._adapter.drop()
    files = vllm_engine.peft_files

    def elsewhere(state: dict[str, Tensor], **given: Any) -> dict[str, bytes]:
        return files({f"language_model.{name}": t for name, t in state.items()}, **given)

    monkeypatch.setattr(vllm_engine, "peft_files", elsewhere)
    with pytest.raises(ValueError, match=r"model\.target_modules: .*down_proj"):
        engine._check_binding()
    engine._adapter.drop()
    monkeypatch.undo()
    engine._check_binding()


def test_bf16_and_the_end_of_the_processes(model: CausalLM) -> None:
    children = child_processes()
    engine = VllmEngine(model, model.network, dtype="bf16", chunk_size=4, **SMALL)
    assert child_processes() > children
    put_lora(engine, model, 1)
    batch = sample(engine, per_prompt=16)
    difference = differences(model, batch)
    print(
        f"bf16 against the fp32 trainer: mean |difference| {difference.mean():.1e}, max "
        f"{difference.max():.1e}"
    )
    assert 1e-4 < difference.mean() < 0.05
    engine.close()
    deadline = time.monotonic() + 20
    while not child_processes() <= children and time.monotonic() < deadline:
        time.sleep(0.1)
    assert child_processes() <= children


def sample(
    engine: VllmEngine,
    *,
    seed: int = 0,
    per_prompt: int = 8,
    temperature: float = 0.8,
    prompts: tuple[str, ...] = PROMPTS,
    response_length: int = 12,
) -> TokenBatch:
    request = TextRequest(
        prompts=PromptBatch(
            step=1,
            prompts=[Prompt(text=text, index=i) for i, text in enumerate(prompts)],
            slots=range(len(prompts)),
        ),
        samples_per_prompt=per_prompt,
        spec=TokenSpec(
            dtype=engine._dtype,
            temperature=temperature,
            prompt_length=12,
            response_length=response_length,
        ),
        seeds=[derive_seed(seed, row) for row in range(per_prompt * len(prompts))],
    )
    chunks = list(engine.generate(request))
    batch = concat([chunk.batch for chunk in chunks])
    assert [prompt.text for chunk in chunks for prompt in chunk.prompts] == [
        p for p in prompts for _ in range(per_prompt)
    ]
    assert len(batch) == len(request.seeds)
    return batch


def set_lora(model: CausalLM, version: int) -> dict[str, Tensor]:
    """Sets a LoRA for each version; version 0 has no effect, like a fresh one."""
    for name, parameter in lora_parameters(model.network).items():
        scale = 0.0 if version == 0 and ".lora_B." in name else 0.1
        parameter.data.copy_(scale * normal(parameter.shape, [version], name)[0])
    return {name: p.detach().clone() for name, p in lora_parameters(model.network).items()}


def put_lora(engine: VllmEngine, model: CausalLM, version: int) -> None:
    engine.sync_weights(set_lora(model, version), version)


def differences(model: CausalLM, batch: TokenBatch) -> Tensor:
    with torch.no_grad():
        log_probs = TokenPolicy(model, model.network).evaluate(batch).log_probs
    return (log_probs - batch.rollout_log_probs)[batch.response_mask].abs()


def mismatch(model: CausalLM, batch: TokenBatch) -> float:
    return differences(model, batch).max().item()


def child_processes() -> set[str]:
    tasks = Path("/proc/self/task").iterdir()
    return {child for task in tasks for child in (task / "children").read_text().split()}
