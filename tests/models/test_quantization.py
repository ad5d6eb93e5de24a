"""Frozen weights in 8 or 4 bits: what they are, what they give, and what refuses them."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from peft import PeftModel
from support.image_rollouts import make_spec
from support.marks import slow
from support.text_rollouts import SPEC, lora_state, perturb, sample_texts
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, GPT2Config

from flowgrpo_rc import assets
from flowgrpo_rc.core.random import normal
from flowgrpo_rc.exports.lora import export_lora
from flowgrpo_rc.models import causal_lm, quantization
from flowgrpo_rc.models.architecture import build_architecture
from flowgrpo_rc.models.base import DTYPES, ModelConfig, load_model
from flowgrpo_rc.models.lora import add_lora, lora_parameters, reference_policy
from flowgrpo_rc.models.quantization import GROUPS, QuantizedLinear, RestoredLinear
from flowgrpo_rc.policies.token import TokenPolicy
from flowgrpo_rc.rollout.replica import Replica

CPU = torch.device("cpu")
# Appendix E of https://arxiv.org/abs/2305.14314, without its -1 and 1.
NF4 = """-0.6961928 -0.52507305 -0.3949175 -0.28444138 -0.18477343 -0.09105004 0
    0.0795803 0.1609302 0.2461123 0.33791524 0.44070983 0.562617 0.72295684"""


def restored(network: Any) -> Any:
    """Returns a copy whose quantized layers are plain ones with the restored weight."""
    found = nn.Sequential(copy.deepcopy(network))
    for name, child in list(found.named_modules()):
        if isinstance(child, RestoredLinear):
            layer = nn.Linear(child.in_features, child.out_features)
            layer.weight, layer.bias = nn.Parameter(child.weight, requires_grad=False), child.bias
            for hook in child._forward_pre_hooks.values():  # of the kernels for a CPU
                layer.register_forward_pre_hook(hook)
            found.set_submodule(name, layer)
    return found[0]


keep = nn.Identity()


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", GROUPS)
def test_a_layer_and_its_gradient_are_those_of_the_restored_weight(name, dtype, mixed):
    torch.manual_seed(0)
    packed = QuantizedLinear(nn.Linear(128, 48, dtype=DTYPES[dtype]).requires_grad_(False), name)
    hooks = torch.autograd.graph.saved_tensors_hooks
    again = partial(checkpoint, packed, use_reentrant=False)
    found = []
    # No tensor of a quantized layer waits for the backward pass.
    for layer, pack in ((packed, pytest.fail), (restored(packed), keep), (again, keep)):
        inputs = normal((3, 128), [1, 2]).to(DTYPES[dtype]).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed), hooks(pack, keep):
            outputs = layer(inputs)
        outputs.backward(torch.ones_like(outputs) / 3)
        found.append((outputs.detach(), inputs.grad))
    for others in found[1:]:
        assert [one.dtype for one in others] == [one.dtype for one in found[0]]
        assert all(map(torch.equal, others, found[0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", GROUPS)
def test_each_weight_becomes_the_nearest_level_of_its_group(name, dtype):
    group, most = GROUPS[name] or 128, 127 if name == "int8" else 7
    levels = torch.arange(-most, most + 1)
    if name == "nf4":
        levels = torch.tensor([-1.0, *map(float, NF4.split()), 1.0])
    layer = nn.Linear(128, 48, bias=False, dtype=dtype)
    layer.weight.data[0] = 0
    packed = QuantizedLinear(layer, name)
    rows = layer.weight.detach().float().unflatten(1, (-1, group))
    scale = packed.scale.float().unsqueeze(2)
    largest = rows.abs().amax(2, keepdim=True)
    torch.testing.assert_close(scale, largest / levels[-1], rtol=2**-8, atol=0)
    nearest = (rows.unsqueeze(3) - scale.unsqueeze(3) * levels).abs().amin(3)
    error = (packed.weight.float().view_as(rows) - rows).abs()
    # bf16 rounds level and product.
    assert (error <= nearest + rows.abs() * (2**-7 if dtype == torch.bfloat16 else 1e-6)).all()


@pytest.mark.parametrize(
    ("name", "dtype", "idle", "again"),
    [
        ("int4", "fp32", False, False),
        ("nf4", "bf16", "layers", True),
        slow("int8", "bf16", False, True),
        slow(None, "fp32", "layers", False),
    ],
)
def test_a_transformer_trains_samples_and_refers_to_the_restored_weights(name, dtype, idle, again):
    path = str(assets.path("tiny_glyph_sd3"))
    config = ModelConfig(path=path, dtype=dtype, lora_rank=4, quantization=name, offload_idle=idle)
    model = load_model(config, CPU)
    network = add_lora(model, config, seed=0)
    perturb(network, 0.01)
    packed = [module for module in network.modules() if isinstance(module, RestoredLinear)]
    assert len(packed) == len(quantization.quantized_layers(network))
    text = model.encode(["A", "B"], max_sequence_length=16)
    inputs = normal((8, 8, 16), [1, 2]), torch.tensor([900.0, 500.0]), text, None

    def velocity(network: Any) -> torch.Tensor:
        return model.velocity(network, *inputs, make_spec("sde", 1.0))

    found: list[list[torch.Tensor]] = []
    for one in (restored(network), network):
        if again:
            one.train().enable_gradient_checkpointing()
        trained = velocity(one)
        trained.square().sum().backward()
        with reference_policy(one):
            found.append([trained.detach(), velocity(one).detach()])
        found[-1] += [p.grad for p in lora_parameters(one).values()]
    assert all(map(torch.equal, *found))
    assert sum(bool(tensor.any()) for tensor in found[0]) > len(found[0]) / 2
    other = "fp32" if dtype == "bf16" else "bf16"
    same, rounded = (Replica(network, precision).network for precision in (dtype, other))
    with torch.no_grad():
        assert torch.equal(velocity(same), found[0][0])
    theirs = dict(rounded.named_parameters())
    for key, ours in network.named_parameters():
        assert (theirs[key].data_ptr() == ours.data_ptr()) == key.endswith(".codes")
    staying = [layer.get_parameter(layer.stored) for layer in packed if idle]
    assert {*staying} == {p for p in network.to("meta").parameters() if not p.is_meta}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_language_model_s_lora_is_exact_on_the_restored_weights(lm_config, dtype, tmp_path):
    config = replace(lm_config, quantization="int4", dtype=dtype)
    model = causal_lm.load_causal_lm(config, CPU)
    perturb(add_lora(model, config, seed=0))
    batch, _ = sample_texts(model, replace(SPEC, dtype=dtype))
    network, found = model.network, []
    for one, again in ((restored(network), False), (network, False), (network, True)):
        one.zero_grad()
        log_probs = TokenPolicy(model, one, checkpoint_gradients=again).evaluate(batch).log_probs
        log_probs.sum().backward()
        found.append([log_probs.detach(), *(p.grad for p in lora_parameters(one).values())])
    assert all(torch.equal(a, b) and torch.equal(b, c) for a, b, c in zip(*found, strict=True))
    # Others load the exported LoRA on weights of their own: here on the restored ones.
    export_lora(lora_state(network), config, tmp_path / "lora")
    stock = AutoModelForCausalLM.from_pretrained(lm_config.path, dtype=DTYPES[dtype])
    quantization.quantize_blocks(stock, "int4", CPU)
    stock = PeftModel.from_pretrained(restored(stock), tmp_path / "lora")
    assert torch.equal(TokenPolicy(model, stock).log_probs(batch, len(batch)), found[0][0])


def test_what_is_refused_before_weights_are_read(lm_config, saved, tmp_path) -> None:
    flux = ModelConfig(path=str(saved("FluxPipeline")), quantization="nf4")
    words = r"nf4 takes .*multiples of 64; the model has one of 32"
    with pytest.raises(ValueError, match=words):
        build_architecture(flux)
    config = replace(lm_config, quantization="nf4")
    with pytest.raises(ValueError, match=words):
        causal_lm.check_quantization(config)
    causal_lm.check_quantization(replace(config, quantization="int8"))
    GPT2Config(n_layer=1, n_embd=32, n_head=2).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"=int8: a GPT2LMHeadModel has no linear layers in"):
        causal_lm.check_quantization(replace(config, quantization="int8", path=str(tmp_path)))
