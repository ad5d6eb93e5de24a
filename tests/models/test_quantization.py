"""Frozen weights in 8 or 4 bits: what they are, what they give, and what refuses them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from support.image_rollouts import WINDOWS, make_spec, sample_images
from support.text_rollouts import SPEC, lora_state, perturb, sample_texts
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, GPT2Config

from flowgrpo_rc import assets
from flowgrpo_rc.batch import SamplerSpec
from flowgrpo_rc.core.random import normal
from flowgrpo_rc.exports.lora import export_lora
from flowgrpo_rc.models import causal_lm
from flowgrpo_rc.models.architecture import build_architecture
from flowgrpo_rc.models.base import DTYPES, FlowModel, ModelConfig, load_model
from flowgrpo_rc.models.lora import add_lora, lora_parameters, reference_policy
from flowgrpo_rc.models.quantization import GROUPS, QuantizedLinear, quantize_blocks
from flowgrpo_rc.policies.flow import FlowPolicy
from flowgrpo_rc.policies.token import TokenPolicy
from flowgrpo_rc.rollout.replica import Replica

CPU = torch.device("cpu")
# Appendix E of https://arxiv.org/abs/2305.14314.
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


def plain(network: Any) -> Any:
    """Returns a copy whose quantized layers are plain ones with the restored weight."""
    found = copy.deepcopy(network)
    for parent in list(found.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, QuantizedLinear):
                setattr(parent, name, plain_layer(child))
    return found


def plain_layer(layer: QuantizedLinear) -> nn.Linear:
    restored = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
    restored.weight = nn.Parameter(layer.weight, requires_grad=False)
    restored.bias = layer.bias
    return restored


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", GROUPS)
def test_a_layer_and_its_gradient_are_those_of_the_restored_weight(
    name: str, dtype: str, mixed: bool
) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(128, 48, dtype=DTYPES[dtype]).requires_grad_(False)
    packed = QuantizedLinear(layer, name)
    results: list[tuple[torch.Tensor, ...]] = []
    for one in (packed, plain_layer(packed), partial_checkpoint(packed)):
        inputs = normal((3, 128), [1, 2]).to(DTYPES[dtype]).requires_grad_()
        refused = (refuse if one is packed else keep, keep)
        with (
            torch.autograd.graph.saved_tensors_hooks(*refused),
            torch.autocast("cpu", torch.bfloat16, enabled=mixed),
        ):
            outputs = one(inputs)
        outputs.backward(torch.ones_like(outputs) / 3)
        results.append((outputs.detach(), inputs.grad))
    for others in results[1:]:
        for found, wanted in zip(others, results[0], strict=True):
            assert found.dtype == wanted.dtype
            assert torch.equal(found, wanted)


def keep(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def refuse(tensor: torch.Tensor) -> torch.Tensor:
    raise AssertionError("a tensor waits for the backward pass")


def partial_checkpoint(layer: nn.Module) -> Any:
    return lambda inputs: checkpoint(layer, inputs, use_reentrant=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", GROUPS)
def test_each_weight_becomes_the_nearest_level_of_its_group(name: str, dtype: torch.dtype) -> None:
    layer = nn.Linear(128, 48, bias=False, dtype=dtype)
    nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(0))
    layer.weight.data[0, :64] = 0
    packed = QuantizedLinear(layer, name)
    levels = torch.tensor(NF4) if name == "nf4" else torch.arange(-7.0, 8)
    if name == "int8":
        levels = torch.arange(-127.0, 128)
    rows = layer.weight.detach().float().unflatten(1, (-1, GROUPS[name] or 128))
    scale = packed.scale.float().unsqueeze(2)
    torch.testing.assert_close(
        scale, rows.abs().amax(2, keepdim=True) / levels.max(), rtol=2**-8, atol=0
    )
    candidates = scale.unsqueeze(3) * levels
    nearest = (rows.unsqueeze(3) - candidates).abs().amin(3)
    error = (packed.weight.float().view_as(rows) - rows).abs()
    # bf16 rounds level and product; int8 and int4 have exact levels.
    slack = 2**-7 * rows.abs() + 1e-6 if dtype == torch.bfloat16 else 1e-5
    assert (error <= nearest + slack).all()
    assert packed.weight[0, :64].abs().max() == (0 if name != "int8" else packed.weight[0, 0].abs())
    bits = 8 * sum(p.nbytes for p in packed.parameters()) / layer.weight.numel()
    assert bits == {"int8": 8, "int4": 4, "nf4": 4}[name] + 8 * dtype.itemsize / (
        GROUPS[name] or 128
    )


def loaded(name: str | None, dtype: str = "fp32") -> FlowModel:
    """Returns the bundled model with a LoRA that takes part."""
    path = str(assets.path("tiny_glyph_sd3"))
    config = ModelConfig(path=path, dtype=dtype, lora_rank=4, quantization=name)
    model = load_model(config, CPU)
    perturb(add_lora(model, config, seed=0), 0.01)
    return model


def gradients(model: FlowModel, network: Any, checkpointed: bool) -> list[torch.Tensor]:
    """Returns a velocity and the gradients of the LoRA."""
    if checkpointed:
        network.enable_gradient_checkpointing()
    network.train(checkpointed)
    text = model.encode(["A", "B"], max_sequence_length=16)
    inputs = normal((8, 8, 16), [1, 2]), torch.tensor([900.0, 500.0]), text
    spec: SamplerSpec = make_spec("sde", 1.0)
    velocity = model.velocity(network, *inputs, None, spec)
    velocity.square().sum().backward()
    return [velocity.detach(), *(p.grad for p in lora_parameters(network).values())]


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize(("name", "dtype"), [("int8", "bf16"), ("int4", "fp32"), ("nf4", "bf16")])
def test_a_transformer_trains_as_with_the_restored_weights(
    name: str, dtype: str, checkpointed: bool
) -> None:
    model = loaded(name, dtype)
    network = model.network
    assert {p.dtype for p in lora_parameters(network).values()} == {torch.float32}
    restored = plain(network)
    packed = [module for module in network.modules() if isinstance(module, QuantizedLinear)]
    assert len(packed) == sum(
        isinstance(module, nn.Linear) and "lora_" not in key
        for key, module in network.transformer_blocks.named_modules()
    )
    found, wanted = (gradients(model, one, checkpointed) for one in (network, restored))
    assert all(map(torch.equal, found, wanted))
    assert sum(bool(gradient.any()) for gradient in found) > len(found) / 2


def test_the_reference_and_a_copy_have_the_same_rounded_weights() -> None:
    model = loaded("int4")
    full = loaded(None)
    x, at = normal((8, 8, 16), [1, 2]), torch.tensor([900.0, 500.0])
    text, spec = model.encode(["A", "B"], max_sequence_length=16), make_spec("sde", 1.0)

    @torch.no_grad()
    def velocity(network: Any, *, reference: bool = False) -> torch.Tensor:
        with reference_policy(network) if reference else nullcontext():
            return model.velocity(network, x, at, text, None, spec)

    network = model.network
    restored = plain(network)
    base = velocity(network, reference=True)
    assert torch.equal(base, velocity(restored, reference=True))
    assert (base - velocity(full.network, reference=True)).abs().mean() > 1e-3
    replica, in_bf16 = (Replica(network, dtype).network for dtype in ("fp32", "bf16"))
    assert torch.equal(velocity(replica), velocity(network))
    for copied in (replica, in_bf16):
        theirs = dict(copied.named_parameters())
        codes = [name for name in theirs if name.endswith(".codes")]
        ours = dict(network.named_parameters())
        assert all(theirs[name].data_ptr() == ours[name].data_ptr() for name in codes)
        assert codes
    assert in_bf16.transformer_blocks[0].ff.net[2].weight.dtype == torch.bfloat16
    rounding = (velocity(in_bf16) - velocity(network)).abs().mean()
    assert 0 < rounding < (base - velocity(full.network, reference=True)).abs().mean() / 4


def test_rollouts_with_full_weights_have_a_mismatch_that_the_trainer_measures() -> None:
    full = loaded(None)
    sampled, _ = sample_images(full, full.network, make_spec("sde", 1.0), WINDOWS["all"])
    sizes = []
    for name in (None, "int8", "int4"):
        model = loaded(name)
        log_probs = FlowPolicy(model, model.network).log_probs(sampled, 4)
        sizes.append(float((log_probs - sampled.rollout_log_probs).abs().mean()))
    assert sizes[0] < 1e-6 < 1e-5 < sizes[1] < sizes[2] / 4


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_language_model_trains_and_its_lora_is_exact_on_the_restored_weights(
    lm_config: ModelConfig, dtype: str, tmp_path: Path
) -> None:
    config = replace(lm_config, quantization="int4", dtype=dtype)
    model = causal_lm.load_causal_lm(config, CPU)
    perturb(add_lora(model, config, seed=0))
    batch, _ = sample_texts(model, replace(SPEC, dtype=dtype))
    network = plain(model.network)
    found = []
    for one, checkpointed in ((network, False), (model.network, False), (model.network, True)):
        policy = TokenPolicy(model, one, checkpoint_gradients=checkpointed)
        one.zero_grad()
        log_probs = policy.evaluate(batch).log_probs
        log_probs.sum().backward()
        gradients = [p.grad.clone() for p in lora_parameters(one).values()]
        found.append([log_probs.detach(), *gradients])
    assert all(map(torch.equal, found[0], found[1]))
    assert all(map(torch.equal, found[1], found[2]))
    # Others load the exported LoRA on weights of their own: here on the restored ones.
    export_lora(lora_state(model.network), config, tmp_path / "lora")
    stock = AutoModelForCausalLM.from_pretrained(lm_config.path, dtype=DTYPES[dtype])
    quantize_blocks(stock, "int4", CPU)
    stock = PeftModel.from_pretrained(plain(stock), tmp_path / "lora")
    log_probs = TokenPolicy(model, stock).log_probs(batch, len(batch))
    torch.testing.assert_close(log_probs, found[0][0], rtol=0, atol=0)


def test_the_shapes_of_a_transformer_are_checked_without_its_weights(
    saved: Callable[[str], Path],
) -> None:
    config = ModelConfig(path=str(saved("FluxPipeline")), quantization="nf4")
    with pytest.raises(ValueError, match=r"nf4 takes .*multiples of 64; the model has one of 32"):
        build_architecture(config)
    packed = build_architecture(replace(config, quantization="int4")).network
    assert packed.transformer_blocks[0].attn.to_q.codes.device.type == "meta"


def test_what_a_language_model_refuses_before_its_weights_are_read(
    lm_config: ModelConfig, tmp_path: Path
) -> None:
    config = replace(lm_config, quantization="nf4")
    with pytest.raises(ValueError, match=r"nf4 takes .*multiples of 64; the model has one of 32"):
        causal_lm.check_quantization(config)
    causal_lm.check_quantization(replace(config, quantization="int8"))
    GPT2Config(n_layer=1, n_embd=32, n_head=2).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"=int8: a GPT2LMHeadModel has no linear layers in"):
        causal_lm.check_quantization(replace(config, quantization="int8", path=str(tmp_path)))
