"""Quantized and compiled replicas, and what they need."""

from __future__ import annotations

import copy
from operator import attrgetter
from typing import Any

import pytest
import torch
from support.compositions import resolved
from support.image_rollouts import WINDOWS, make_spec, trained_lora
from support.kernels import needs_int8_kernels
from support.marks import slow
from support.runs import fingerprint
from support.torchao import needs_torchao
from torch import nn

from flowgrpo_rc.batch import Prompt, PromptBatch
from flowgrpo_rc.config.tree import Config
from flowgrpo_rc.core.random import normal
from flowgrpo_rc.models.base import FlowModel
from flowgrpo_rc.models.lora import lora_parameters
from flowgrpo_rc.policies.flow import FlowPolicy
from flowgrpo_rc.rollout.concat import concat
from flowgrpo_rc.rollout.diffusers_engine import DiffusersEngine
from flowgrpo_rc.rollout.engine import ImageRequest
from flowgrpo_rc.rollout.options import compiled
from flowgrpo_rc.rollout.options.compiled import Compiled, compile_blocks, inductor_or_eager
from flowgrpo_rc.rollout.options.quantized import (
    INT4_GROUP,
    NAMES,
    Quantized,
    count_quantized,
    quantize,
)
from flowgrpo_rc.rollout.replica import Replica
from flowgrpo_rc.spec import check_engine

QUANTIZATIONS = [
    pytest.param(name, marks=needs_int8_kernels) if name == "int8_dynamic" else name
    for name in NAMES
]


def largest_error(name: str, weight: torch.Tensor) -> torch.Tensor:
    """Returns half a step of the format's grid around each weight; a whole step if the grid is
    not symmetric.
    """
    if name == "fp8":  # e4m3: three bits after the leading one; below 2^-6 of 448, steps of 2^-9
        smallest = weight.abs().amax(1, keepdim=True) / 448 * 2**-9
        return torch.maximum(weight.abs() / 16, smallest / 2)
    if name == "int4":
        groups = weight.unflatten(1, (-1, INT4_GROUP))
        return (groups.abs().amax(2, keepdim=True) / 7).expand_as(groups).flatten(1)
    return (weight.abs().amax(1, keepdim=True) / 127 / 2).expand_as(weight)


@torch.no_grad()
def velocities(model: FlowModel, *networks: nn.Module) -> list[torch.Tensor]:
    """Returns what each network predicts for the same two samples."""
    inputs = (
        normal((8, 8, 16), [1, 2]),
        torch.tensor([900.0, 500.0]),
        model.encode(["A", "B"], max_sequence_length=16),
    )
    return [model.velocity(network, *inputs, None, 1.0) for network in networks]


@needs_torchao
@pytest.mark.parametrize("name", QUANTIZATIONS)
def test_only_the_blocks_base_weights_are_quantized(bundled: FlowModel, name: str) -> None:
    network = trained_lora(bundled)
    before = fingerprint(network.state_dict())
    replica = Replica(network, "fp32", [Quantized(name, "fp32")]).network
    own = dict(network.named_parameters())
    quantized = set()
    for key, parameter in replica.named_parameters():
        if type(parameter) is nn.Parameter:
            assert torch.equal(parameter, own[key])
        else:
            quantized.add(key.removesuffix(".weight"))
            error = (parameter.dequantize() - own[key]).abs()
            assert (error <= 1.001 * largest_error(name, own[key]) + 1e-9).all()
            assert error.max() > 0
    wanted = {
        module_name
        for module_name, module in network.named_modules()
        if isinstance(module, nn.Linear)
        and "transformer_blocks." in module_name
        and "lora_" not in module_name
    }
    assert quantized == wanted
    assert "transformer_blocks.0.attn.to_q.base_layer" in quantized
    assert fingerprint(network.state_dict()) == before


@pytest.mark.kernels
@needs_torchao
@pytest.mark.parametrize("name", ["int8", "int4", "fp8"])
def test_the_lora_stays_separate(bundled: FlowModel, name: str) -> None:
    """A quantized replica is the network with rounded base weights and an exact LoRA, also after
    a sync.
    """
    network = trained_lora(bundled)
    replica = Replica(network, "fp32", [Quantized(name, "fp32")])
    rounded = copy.deepcopy(network)
    for (_, stored), parameter in zip(
        replica.network.named_parameters(), rounded.parameters(), strict=True
    ):
        parameter.data = stored.data if type(stored) is nn.Parameter else stored.dequantize()
    state = {key: parameter.detach() + 0.01 for key, parameter in lora_parameters(network).items()}
    replica.sync(state)
    for key, parameter in lora_parameters(rounded).items():
        parameter.data = state[key].clone()
    found, wanted, plain = velocities(bundled, replica.network, rounded, network)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(found, plain, atol=1e-4)


@pytest.mark.kernels
@needs_torchao
@pytest.mark.parametrize("dtype", ["bf16", slow("fp32"), slow("fp16")])
@pytest.mark.parametrize("name", QUANTIZATIONS)
def test_the_rollout_says_its_precision_and_the_mismatch_shows_it(bundled, dtype, name):
    network = trained_lora(bundled)
    engine = DiffusersEngine(
        bundled, network, dtype=dtype, chunk_size=4, options=[Quantized(name, dtype)]
    )
    request = ImageRequest(
        prompts=PromptBatch(step=1, prompts=[Prompt(text='"AB7X"', index=0)], slots=[0]),
        samples_per_prompt=4,
        spec=make_spec("sde", 1.0, dtype=f"{dtype}+{name}"),
        window=torch.tensor(WINDOWS["all"] * 4),
        seeds=[1, 2, 3, 4],
    )
    batch = concat([chunk.batch for chunk in engine.generate(request)])
    assert batch.spec == request.spec
    difference = (
        (FlowPolicy(bundled, network).log_probs(batch, 4) - batch.rollout_log_probs).abs().mean()
    )
    assert 2e-5 < difference < (0.05 if name == "int4" else 5e-3)


@needs_torchao
def test_a_layer_that_int4_cannot_take() -> None:
    network = nn.Sequential(nn.ModuleList([nn.Linear(48, 32)]))
    with pytest.raises(
        ValueError, match=r"rollout\.quantization=int4 .* multiples of 32; the model has one of 48"
    ):
        quantize(network, "int4")


class Block(nn.Linear):
    """A block with a number that becomes part of its code, for which inductor asks for another."""

    def forward(self, x: torch.Tensor, eps: float) -> torch.Tensor:
        return nn.functional.layer_norm(torch.tanh(super().forward(x)), (4,), eps=eps)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, as it loads inductor
@pytest.mark.parametrize("fails", [slow(False), True])
@torch.no_grad()
def test_what_does_not_compile_runs_without_it(fails: bool, monkeypatch, caplog) -> None:
    def broken(graph: object, inputs: object) -> None:
        raise RuntimeError("no space left\nin the cache")

    if fails:
        monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda name: broken)
    elif check_engine.missing_for_compiling(torch.device("cpu")):
        pytest.skip("no C++ compiler")
    torch._dynamo.reset()  # or the code of the other case is taken over
    blocks, failed = nn.ModuleList([Block(4, 4)]), []
    monkeypatch.setattr(compiled, "_failed", failed)
    inputs = [torch.ones(rows, 4) for rows in (1, 3)]
    plain = [blocks[0](x, 0.1) for x in inputs]
    compile_blocks(nn.Sequential(blocks), inductor_or_eager)
    torch.testing.assert_close([blocks[0](x, 0.1) for x in inputs], plain)
    assert set(failed) == ({"RuntimeError"} if fails else set())
    note = "rollout.compile: a block runs without it (no space left)"
    assert [text for text in caplog.messages if text.startswith("rollout.")] == [note] * fails


# --- What they need


@pytest.mark.parametrize(
    ("setting", "value", "words"),
    [
        ("rollout.compile", True, r"rollout\.compile=true on cuda needs a C compiler \(gcc or"),
        ("actor.optim.name", "adamw_8bit", r"adamw_8bit on cuda needs .* and /none/Python\.h"),
    ],
)
def test_what_triton_needs_is_looked_for_before_loading(
    monkeypatch, checkpoint, setting, value, words
):
    config = Config()
    config.model.path = str(checkpoint)
    check_engine.check_machine(resolved(config, device="cuda"))
    section, _, name = setting.rpartition(".")
    setattr(attrgetter(section)(config), name, value)
    monkeypatch.setattr(check_engine.shutil, "which", lambda name: None)
    monkeypatch.setattr(check_engine.sysconfig, "get_path", lambda name: "/none")
    with pytest.raises(ValueError, match=words):
        check_engine.check_machine(resolved(config, device="cuda"))


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [("vllm_engine", "quantization", "int8"), ("transformers_engine", "compile", True)],
)
def test_an_engine_that_does_not_offer_a_precision(name, key, value):
    config = Config()
    config.model.kind = "causal_lm"
    config.model.path = "a/b"
    config.rollout.name = name
    setattr(config.rollout, key, value)
    with pytest.raises(ValueError, match=rf"rollout\.{key}.*rollout\.name={name}"):
        check_engine.check_engine(resolved(config))


def saturating(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Multiplies int8 as kernels without VNNI do, which add pairs of products in 16 bits."""
    shifted = left.int() + 128  # their left side has no sign
    products = shifted[:, :, None] * right.int()
    pairs = products.unflatten(1, (-1, 2)).sum(2).clamp(-(2**15), 2**15 - 1)
    return (pairs.sum(1) - 128 * right.int().sum(0)).int()


def test_a_processor_whose_int8_products_overflow_is_refused(checkpoint, monkeypatch):
    small = torch.ones(4, 8, dtype=torch.int8)
    assert (saturating(small, small.mT) == 8).all()
    config = Config()
    config.model.path = str(checkpoint)
    config.rollout.quantization = "int8_dynamic"
    monkeypatch.setattr(torch, "_int_mm", saturating)
    words = r"int8_dynamic: this processor's integer kernels overflow.* Set .*quantization=int8,"
    with pytest.raises(ValueError, match=words):
        check_engine.check_machine(resolved(config))
    network = nn.Sequential(nn.ModuleList([nn.Linear(8, 8)]))
    with pytest.raises(ValueError, match=words):  # on a worker's machine
        quantize(network, "int8_dynamic")
    config.rollout.quantization = "int8"
    check_engine.check_machine(resolved(config))


def test_quantizations_that_a_gpu_does_slowly_or_not_at_all(caplog) -> None:
    gpu = torch.device("cuda")
    Quantized("int4", "fp16").check_device(torch.device("cpu"), [])
    for dtype, name, words in (
        ("fp16", "int4", r"=int4 on a GPU needs rollout\.dtype=bf16, not fp16"),
        ("bf16", "int8_dynamic", r"int8_dynamic on a GPU needs rollout\.compile=true"),
    ):
        with pytest.raises(ValueError, match=words):
            Quantized(name, dtype).check_device(gpu, [])
    assert caplog.messages == []
    Quantized("int8_dynamic", "bf16").check_device(gpu, [Compiled()])
    Quantized("int4", "bf16").check_device(gpu, [])
    assert "rollouts may be slower than in bf16" in caplog.text


# --- Counting, on weights that stand in for those of real kernels


class LikeTorchao(torch.Tensor):
    """A tensor that reports the precision that it had before, as those of torchao do."""

    __module__ = "torchao.quantization"


@pytest.mark.parametrize(
    ("weight", "counts"),
    [
        (torch.zeros(4, 4, dtype=torch.bfloat16), False),
        (torch.zeros(4, 4, dtype=torch.float16), False),
        (torch.zeros(4, 4).to(torch.float8_e4m3fn), True),
        (torch.zeros(4, 2, dtype=torch.uint8), True),
        (torch.zeros(1, 4, dtype=torch.int32), True),
        (torch.zeros(4, 4, dtype=torch.bfloat16).as_subclass(LikeTorchao), True),
    ],
    ids=["bf16", "fp16", "fp8", "two of 4 bits", "packed", "torchao"],
)
def test_quantized_weights_count(weight: torch.Tensor, counts: bool) -> None:
    net: Any = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Sequential(nn.Linear(4, 2)))
    for number, layer in enumerate((net[0], net[2][0])):
        layer.weight = nn.Parameter(weight, requires_grad=False)
        assert count_quantized(net) == ((number + 1) * counts, 2)


def test_a_scale_or_a_norm_in_8_bits_is_no_quantized_layer() -> None:
    net: Any = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    net[1].weight = nn.Parameter(torch.zeros(4, dtype=torch.int8), requires_grad=False)
    net[0].weight_scale = nn.Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False)
    net[0].quant_method = "Fp8LinearMethod"
    assert count_quantized(net) == (0, 1)
