"""Counts what a quantization really did to a network."""

from __future__ import annotations

from torch import nn

from flowgrpo_rc.rollout.quantization import is_quantized


def quantized_layers(network: nn.Module) -> tuple[int, int]:
    """Counts the layers that hold quantized matrices, and those that hold any matrix.

    Norms and biases stay as they are in every method. A method that a layer merely names does not
    count either, since its kernel may have left the weights alone.
    """
    matrices = [
        [weight for weight in module.parameters(recurse=False) if weight.ndim > 1]
        for module in network.modules()
    ]
    layers = [weights for weights in matrices if weights]
    return sum(any(map(is_quantized, weights)) for weights in layers), len(layers)
