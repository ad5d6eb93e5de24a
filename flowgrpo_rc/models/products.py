"""Frozen fp32 layers on a CPU by oneDNN, in place of MKL, which torch would call."""

from typing import Any

import torch
from torch import Tensor, nn

from flowgrpo_rc.models.quantization import FrozenProduct


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
    """Returns x W^T + b by oneDNN, without a graph; x [..., in], W [out, in], both fp32."""
    # The public setting, torch.backends.mkldnn.matmul.fp32_precision, does this only by allowing
    # bf16, for all threads, and for the small products of attention, which then take long.
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class OneDNNLinear(nn.Linear):
    """A linear layer that oneDNN computes while it is frozen, fp32 and on a CPU."""

    def forward(self, input: Tensor) -> Any:
        """Computes x W^T + b."""
        # A quantized or sharded weight has a type of its own; autocast and compilers see F.linear.
        is_plain = type(self.weight) is nn.Parameter and not self.weight.requires_grad
        is_fp32 = input.dtype == self.weight.dtype == torch.float32
        is_eager = not (torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling())
        if is_plain and is_fp32 and is_eager and input.device.type == "cpu":
            return FrozenProduct.apply(input, self, product)
        return super().forward(input)


def use_onednn(network: nn.Module) -> None:
    """Has oneDNN compute the plain linear layers of a network, which has no LoRA yet."""
    for module in network.modules():
        if type(module) is nn.Linear:
            module.__class__ = OneDNNLinear
