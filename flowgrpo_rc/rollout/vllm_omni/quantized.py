"""Counts what a quantization really did to a network."""

from __future__ import annotations

from torch import Tensor, nn


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
    return sum(any(map(_is_quantized, weights)) for weights in layers), len(layers)


def _is_quantized(weight: Tensor) -> bool:
    """Says whether a weight is in 8 bits or fewer, packed in integers, or a tensor of torchao."""
    return (
        weight.element_size() == 1
        or not weight.is_floating_point()
        # They report the precision that they had before.
        or type(weight).__module__.startswith("torchao.")
    )
