"""Counting quantized layers, on networks whose weights stand in for those of real kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flowgrpo_rc.rollout.vllm_omni.quantized import quantized_layers


class LikeTorchao(Tensor):
    """A tensor that reports the precision that it had before, as those of torchao do."""

    __module__ = "torchao.quantization"


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Sequential(nn.Linear(4, 2)))


def replace_weight(layer: Any, weight: Tensor) -> None:
    layer.weight = nn.Parameter(weight, requires_grad=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_plain_weights_are_not_quantized(dtype: torch.dtype) -> None:
    assert quantized_layers(network().to(dtype)) == (0, 2)


@pytest.mark.parametrize(
    "weight",
    [
        torch.zeros(4, 4).to(torch.float8_e4m3fn),
        torch.zeros(4, 4, dtype=torch.int8),
        torch.zeros(4, 2, dtype=torch.uint8),
        torch.zeros(1, 4, dtype=torch.int32),
        torch.zeros(4, 4, dtype=torch.bfloat16).as_subclass(LikeTorchao),
    ],
    ids=["fp8", "int8", "two of 4 bits", "packed", "torchao"],
)
def test_quantized_weights_count(weight: Tensor) -> None:
    net: Any = network()
    replace_weight(net[0], weight)
    assert quantized_layers(net) == (1, 2)
    replace_weight(net[2][0], weight)
    assert quantized_layers(net) == (2, 2)


def test_a_scale_or_a_norm_in_8_bits_is_no_quantized_layer() -> None:
    net: Any = network()
    replace_weight(net[1], torch.zeros(4, dtype=torch.int8))
    net[0].weight_scale = nn.Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False)
    net[0].quant_method = "Fp8LinearMethod"
    assert quantized_layers(net) == (0, 2)
