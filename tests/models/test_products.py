"""oneDNN gives frozen fp32 layers what torch's own library does, but for rounding in fp32."""

import copy

import pytest
import torch
from torch import nn

from flowgrpo_rc import assets
from flowgrpo_rc.models.base import ModelConfig, load_model
from flowgrpo_rc.models.lora import add_lora
from flowgrpo_rc.models.products import OneDNNLinear, use_onednn

CPU = torch.device("cpu")
ROUNDING = 1e-6  # of fp32, in sums of some hundred products; that of bf16 is above 1e-3


@pytest.mark.parametrize("shape", [(128, 512), (512, 128), (128, 16)])
def test_products_and_gradients_have_the_error_of_fp32(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    exact = nn.Linear(*shape).double().requires_grad_(False)
    layer = nn.Sequential(copy.deepcopy(exact).float())
    use_onednn(layer)
    x = torch.randn(4, shape[0], 80).mT.requires_grad_()
    layer(x).sum().backward()  # whose gradient comes expanded
    true = exact(x.double())
    (gradient,) = torch.autograd.grad(true.sum(), x)
    for one, other in ((layer(x), true), (x.grad, gradient)):
        assert (one - other).norm() < ROUNDING * other.norm()
    assert torch.equal(layer(x)[:2], layer(x[:2]))  # a replay has other batches


def test_other_layers_are_those_of_torch() -> None:
    layer = nn.Linear(128, 64)
    own = copy.deepcopy(layer)
    use_onednn(layer)
    x = torch.randn(160, 128)
    assert torch.equal(layer(x), own(x))
    torch.autograd.grad(layer(x).sum(), layer.weight)  # it trains
    layer.requires_grad_(False)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(x), own(x))
    assert torch.equal(layer.bfloat16()(x.bfloat16()), own.bfloat16()(x.bfloat16()))


@pytest.mark.parametrize("used", [True, False])
def test_it_computes_the_frozen_layers_if_it_is_asked_to(used: bool) -> None:
    config = ModelConfig(path=str(assets.path("tiny_glyph_sd3")), lora_rank=4, onednn=used)
    network = add_lora(load_model(config, CPU), config, seed=0)
    linear = [m for m in network.modules() if isinstance(m, nn.Linear)]
    for trains, kinds in ((False, {used}), (True, {False})):
        of = [m for m in linear if m.weight.requires_grad == trains]
        assert {type(m) is OneDNNLinear for m in of} == kinds
