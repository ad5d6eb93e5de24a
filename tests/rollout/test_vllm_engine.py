"""VllmEngine against a stand-in that takes only what vLLM 0.30.0 takes.

Every call is bound to the signatures that vllm_real/read_interface.py read from the published
wheel. The real vLLM is tested in vllm_real/.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from bundled_models.build_tiny_adder_lm import build_tokenizer
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from flowgrpo_rc.batch import Prompt, PromptBatch, TokenSpec
from flowgrpo_rc.models.base import ModelConfig
from flowgrpo_rc.models.causal_lm import CausalLM, load_causal_lm
from flowgrpo_rc.models.lora import add_lora, lora_parameters
from flowgrpo_rc.plugins import build, load_class
from flowgrpo_rc.rollout.concat import concat
from flowgrpo_rc.rollout.engine import RolloutEngine, TextRequest
from flowgrpo_rc.rollout.vllm_engine import DTYPES, MAX_LORA_RANKS, VllmEngine, max_lora_rank

INTERFACE = json.loads(
    (Path(__file__).parents[1] / "vllm_real" / "interface_0_30_0.json").read_text()
)
EOS = 1
SPEC = TokenSpec(dtype="fp32", temperature=0.7, prompt_length=8, response_length=4)


class FakeVllm(ModuleType):
    """The modules `vllm` and `vllm.lora.request`.

    A LoRA has no effect on the kinds of modules in `ignored`.
    """

    def __init__(self) -> None:
        super().__init__("vllm")
        self.ignored: set[str] = set()
        self.answers: dict[int, list[int]] = {}
        self.llms: list[FakeLLM] = []
        self.lora = ModuleType("vllm.lora.request")
        self.lora.LoRARequest = lambda **given: fields("LoRARequest", given)
        self.TokensPrompt = lambda **given: vars(fields("TokensPrompt", given))
        assert {"LLM", "SamplingParams", "TokensPrompt"} <= set(INTERFACE["exports"])

    def SamplingParams(self, **given: Any) -> SimpleNamespace:
        params = fields("SamplingParams", given)
        if 0 < params.temperature < 0.01:
            params.temperature = 0.01
        return params

    def LLM(self, *args: Any, **given: Any) -> FakeLLM:
        arguments = bind("LLM.__init__", *args, **given)
        fields("EngineArgs", arguments)
        self.llms.append(FakeLLM(self, arguments))
        return self.llms[-1]


class FakeLLM:
    """Answers with `answers[seed]`.

    The log-prob of a token is -1 - seed - the effect of the adapter.
    """

    def __init__(self, vllm: FakeVllm, arguments: dict[str, Any]) -> None:
        self.vllm = vllm
        self.arguments = arguments
        self.devices = os.environ.get("CUDA_VISIBLE_DEVICES")
        self.allocator = os.environ.get("PYTORCH_ALLOC_CONF")
        self.llm_engine = FakeEngine(vllm)
        self.model_config = SimpleNamespace(max_model_len=arguments["max_model_len"] or 64)
        self.calls: list[dict[str, Any]] = []
        assert {"llm_engine", "model_config"} <= set(INTERFACE["attributes"]["LLM"])
        assert "max_model_len" in INTERFACE["fields"]["ModelConfig"]

    def generate(self, *args: Any, **given: Any) -> list[SimpleNamespace]:
        call = bind("LLM.generate", *args, **given)
        self.calls.append(call)
        adapter = call["lora_request"]
        effect = 0.0 if adapter is None else self.llm_engine.adapters[adapter.lora_int_id]["effect"]
        outputs = []
        for params in call["sampling_params"]:
            tokens = self.vllm.answers.get(params.seed, [2])
            flat = fields(
                "FlatLogprobs", {"logprobs": [-1.0 - params.seed % 97 - effect] * len(tokens)}
            )
            completion = fields("CompletionOutput", {"token_ids": tokens, "logprobs": flat})
            outputs.append(SimpleNamespace(outputs=[completion]))
        assert "outputs" in [name for name, _, _ in INTERFACE["methods"]["RequestOutput.__init__"]]
        return outputs


class FakeEngine:
    """Keeps adapters by their number, as vLLM does; it does not read a known one again."""

    def __init__(self, vllm: FakeVllm) -> None:
        self.vllm = vllm
        self.adapters: dict[int, dict[str, Any]] = {}
        self.running = True
        self.engine_core = SimpleNamespace(shutdown=self.shutdown)
        assert "engine_core" in INTERFACE["attributes"]["LLMEngine"]

    def add_lora(self, *args: Any) -> bool:
        request = bind("LLMEngine.add_lora", *args)["lora_request"]
        if request.lora_int_id not in self.adapters:
            folder = Path(request.lora_path)
            tensors = load_file(folder / "adapter_model.safetensors")
            heard = [
                t
                for name, t in tensors.items()
                if not any(kind in name for kind in self.vllm.ignored)
            ]
            self.adapters[request.lora_int_id] = {
                "config": json.loads((folder / "adapter_config.json").read_text()),
                "tensors": tensors,
                "effect": sum(tensor.abs().sum().item() for tensor in heard),
            }
        return True

    def remove_lora(self, *args: Any) -> bool:
        return self.adapters.pop(bind("LLMEngine.remove_lora", *args)["lora_id"], None) is not None

    def list_loras(self) -> list[int]:
        """Returns a list: vLLM annotates a set, but a list comes from its process."""
        bind("LLMEngine.list_loras")
        return list(self.adapters)

    def shutdown(self, *args: Any) -> None:
        bind("EngineCoreClient.shutdown", *args)
        self.running = False


def bind(method: str, *args: Any, **given: Any) -> dict[str, Any]:
    """Returns the arguments by name; raises TypeError for a call that vLLM's method does not
    accept.
    """
    kinds = inspect.Parameter
    signature = inspect.Signature(
        [
            kinds(name, getattr(kinds, kind), default=None if default else kinds.empty)
            for name, kind, default in INTERFACE["methods"][method]
        ]
    )
    arguments = dict(signature.bind(*args, **given).arguments)
    return arguments | arguments.pop("kwargs", {})


def fields(name: str, given: dict[str, Any]) -> SimpleNamespace:
    """Returns an object with the fields of vLLM's class.

    Raises TypeError for a value that the class has no field for.
    """
    known = INTERFACE["fields"][name]
    if unknown := given.keys() - set(known):
        raise TypeError(f"vLLM's {name} has no {', '.join(sorted(unknown))}")
    return SimpleNamespace(**dict.fromkeys(known) | given)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> FakeVllm:
    fake = FakeVllm()
    monkeypatch.setitem(sys.modules, "vllm", fake)
    monkeypatch.setitem(sys.modules, "vllm.lora", ModuleType("vllm.lora"))
    monkeypatch.setitem(sys.modules, "vllm.lora.request", fake.lora)
    return fake


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lm")
    tokenizer = build_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        eos_token_id=EOS,
        pad_token_id=0,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def model(checkpoint: Path) -> CausalLM:
    config = ModelConfig(kind="causal_lm", path=str(checkpoint), lora_rank=4, lora_alpha=12)
    model = load_causal_lm(config, torch.device("cpu"))
    add_lora(model, config, seed=0)
    return model


def make(model: CausalLM, **options: Any) -> VllmEngine:
    given = {"model": model, "network": model.network, "dtype": "fp32", "chunk_size": 3}
    cls = load_class("flowgrpo_rc.rollout", "vllm_engine", RolloutEngine)
    return build(cls, given | options, "rollout.engine_kwargs")


def state_of(model: CausalLM, scale: float = 1.0) -> dict[str, Tensor]:
    return {name: torch.full_like(p, scale) for name, p in lora_parameters(model.network).items()}


def request(
    seeds: Sequence[int], texts: Sequence[str] = ("1+1=", "37+58="), spec: TokenSpec = SPEC
) -> TextRequest:
    prompts = [Prompt(text=text, index=i) for i, text in enumerate(texts)]
    slots = [10 + i for i in range(len(texts))]
    return TextRequest(
        prompts=PromptBatch(step=1, prompts=prompts, slots=slots),
        samples_per_prompt=len(seeds) // len(texts),
        spec=spec,
        seeds=seeds,
    )


def test_names_and_ranks_are_those_of_vllm() -> None:
    literals = INTERFACE["literals"]
    assert set(DTYPES.values()) <= set(literals["ModelDType"])
    assert list(MAX_LORA_RANKS) == literals["MaxLoRARanks"]
    assert "processed_logprobs" in literals["LogprobsMode"]
    assert {"r", "lora_alpha", "target_modules"} <= set(INTERFACE["fields"]["PEFTHelper"])


def test_construction(vllm: FakeVllm, model: CausalLM, checkpoint: Path) -> None:
    make(model, dtype="bf16", max_model_len=32, gpu_memory_utilization=0.2, quantization="fp8")
    given = vllm.llms[0].arguments
    wanted = {
        "model": str(checkpoint),
        "dtype": "bfloat16",
        "max_lora_rank": 8,
        "enable_lora": True,
        "logprobs_mode": "processed_logprobs",
        "max_model_len": 32,
        "gpu_memory_utilization": 0.2,
        "quantization": "fp8",
        "trust_remote_code": False,
    }
    assert given | wanted == given
    assert "load_format" not in given
    unknown = r"rollout\.engine_kwargs\.max_model_length.*'max_model_len'"
    with pytest.raises(ValueError, match=unknown):
        make(model, max_model_length=32)


def test_a_chat_is_what_the_template_of_the_checkpoint_makes(
    vllm: FakeVllm, model: CausalLM
) -> None:
    model.tokenizer.chat_template = "{% for m in messages %}+{{ m.content }}{% endfor %}="
    asked = request([5, 6], ["1"])
    chat = ({"role": "system", "content": "2"}, {"role": "user", "content": "1"})
    asked.prompts.prompts[0] = replace(asked.prompts.prompts[0], messages=chat)
    engine = make(model)
    list(engine.generate(asked))
    (ids,) = {tuple(prompt["prompt_token_ids"]) for prompt in vllm.llms[0].calls[-1]["prompts"]}
    assert model.tokenizer.decode(ids).replace(" ", "") == "+2+1="


def test_each_sample_is_a_request_with_its_own_seed(vllm: FakeVllm, model: CausalLM) -> None:
    engine = make(model)
    list(engine.generate(request([5, 2**63 - 1, 7, 8])))
    call = vllm.llms[0].calls[-1]
    assert [params.seed for params in call["sampling_params"]] == [5, 2**63 - 1, 7, 8]
    # One token per character after the three special ones.
    one = [4, 13, 4, 14]
    three = [6, 10, 13, 8, 11, 14]
    assert [prompt["prompt_token_ids"] for prompt in call["prompts"]] == [one, one, three, three]
    params = call["sampling_params"][0]
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.7, 1.0, 0, 4)
    assert (params.stop_token_ids, params.ignore_eos, params.logprobs) == ([EOS], True, 0)


def test_batch(vllm: FakeVllm, model: CausalLM) -> None:
    engine = make(model)
    engine.sync_weights(state_of(model, 0.0), 6)
    vllm.answers = {0: [4, 5, EOS], 1: [], 2: [6, 7, 8, 9], 3: [EOS]}
    chunks = list(engine.generate(request([0, 1, 2, 3])))
    assert [len(chunk.batch) for chunk in chunks] == [3, 1]
    assert [text for chunk in chunks for text in chunk.samples] == ["12", "", "3456", ""]
    texts = [prompt.text for chunk in chunks for prompt in chunk.prompts]
    assert texts == ["1+1="] * 2 + ["37+58="] * 2
    batch = concat([chunk.batch for chunk in chunks])
    assert batch.spec == SPEC
    assert batch.prompt_ids.tolist() == [[0, 0, 4, 13, 4, 14]] * 2 + [[6, 10, 13, 8, 11, 14]] * 2
    assert batch.prompt_mask.sum(1).tolist() == [4, 4, 6, 6]
    assert batch.response_ids.tolist() == [[4, 5, EOS, 0], [0] * 4, [6, 7, 8, 9], [EOS, 0, 0, 0]]
    assert batch.response_mask.sum(1).tolist() == [3, 0, 4, 1]
    assert torch.equal(batch.response_mask, batch.response_mask.sort(descending=True, dim=1).values)
    assert batch.rollout_log_probs is not None
    assert batch.rollout_log_probs.dtype == torch.float32
    assert batch.rollout_log_probs.tolist() == [[-1, -1, -1, 0], [0] * 4, [-3] * 4, [-4, 0, 0, 0]]
    assert (batch.group.tolist(), batch.seed.tolist()) == ([10, 10, 11, 11], [0, 1, 2, 3])
    assert batch.policy_version.tolist() == [6] * 4


def test_greedy_is_certain_and_a_changed_temperature_is_echoed(vllm, model):
    engine = make(model)
    (greedy,) = engine.generate(request([0], ["1+1="], replace(SPEC, temperature=0.0)))
    assert greedy.batch.rollout_log_probs is not None
    assert not greedy.batch.rollout_log_probs.any()
    (cold,) = engine.generate(request([0], ["1+1="], replace(SPEC, temperature=0.001)))
    assert cold.batch.spec.differences(SPEC) == ["temperature: 0.01 here, 0.7 there"]


def test_more_tokens_than_the_model_has_room_for(vllm: FakeVllm, model: CausalLM) -> None:
    engine = make(model, max_model_len=11)
    with pytest.raises(ValueError, match=r"rollout\.response_length=4.*max_model_len allow 11"):
        next(engine.generate(request([0, 1])))


def test_sync_writes_what_peft_would_and_replaces_the_adapter(vllm, model):
    engine = make(model)
    fake = vllm.llms[0].llm_engine
    numbers = set(fake.adapters)
    folders = []
    for version in (0, 0, 3):
        engine.sync_weights(state_of(model, version + 0.5), version)
        (number,) = fake.adapters
        assert number not in numbers
        numbers.add(number)
        list(engine.generate(request([0, 1])))
        asked = vllm.llms[0].calls[-1]["lora_request"]
        assert asked.lora_int_id == number
        folders.append(Path(asked.lora_path))
    assert [folder.exists() for folder in folders] == [False, False, True]
    adapter = fake.adapters[number]
    assert (adapter["config"]["r"], adapter["config"]["lora_alpha"]) == (4, 12)
    assert adapter["config"]["peft_type"] == "LORA"
    name = "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"
    assert adapter["tensors"][name].shape == (24, 4)
    assert len(adapter["tensors"]) == 2 * 7 * 2
    assert all(bool((tensor == 3.5).all()) for tensor in adapter["tensors"].values())
    engine.close()
    assert not vllm.llms[0].llm_engine.running
    assert not folders[-1].exists()


def test_other_tensors_are_refused(vllm: FakeVllm, model: CausalLM) -> None:
    engine = make(model)
    state = state_of(model)
    before = vllm.llms[0].llm_engine.list_loras()
    state["layers.9"] = state.pop(sorted(state)[0])
    with pytest.raises(ValueError, match=r"layers\.9"):
        engine.sync_weights(state, 1)
    assert vllm.llms[0].llm_engine.list_loras() == before


def test_lora_that_vllm_ignores_is_refused(vllm: FakeVllm, model: CausalLM) -> None:
    vllm.ignored = {"up_proj"}
    with pytest.raises(
        ValueError, match=r"rollout\.engine_kwargs: model\.target_modules: .*up_proj"
    ):
        make(model)


@pytest.mark.parametrize(
    ("device", "gpus", "seen"), [("cpu", 1, "4,7"), ("cuda:1", 1, "7"), ("cuda:1", 2, "4,7")]
)
def test_vllm_sees_the_gpu_of_the_trainer(vllm, model, monkeypatch, device, gpus, seen):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    model.device = torch.device(device)
    make(model, tensor_parallel_size=gpus)
    assert (vllm.llms[0].devices, vllm.llms[0].allocator) == (seen, "expandable_segments:False")
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,7"


def test_rank() -> None:
    assert [max_lora_rank(rank) for rank in (1, 2, 8, 33, 300, 512)] == [1, 8, 8, 64, 320, 512]
    with pytest.raises(ValueError, match=r"model\.lora_rank=513"):
        max_lora_rank(513)
