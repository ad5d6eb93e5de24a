"""Frozen weights in 8 or 4 bits, under a LoRA: linear layers that keep codes and a scale.

A row of a weight is cut into groups that have one scale each: W = scale * level[code]. The levels
of int8 and int4 are integers; those of nf4 are quantiles of a normal distribution. See "QLoRA",
https://arxiv.org/abs/2305.14314.

The libraries serve sampling better than training. torchao 0.18 keeps each weight that it restored
for the backward pass, and its packed int4 has no backward pass; the int8 of bitsandbytes rounds the
layer's inputs, too.
"""

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# The values of `model.quantization`, each with the length of a group; None is a whole row.
GROUPS = {"int8": None, "int4": 32, "nf4": 64}
# The outermost quantile of nf4, where the paper's own code has it.
_OUTERMOST = 0.9677083


class RestoredLinear(nn.Linear):
    """A frozen linear layer whose weight is restored for each product, and kept by no graph.

    It computes what a layer with the plain weight `weight` does, and so do its gradients.

    Attributes:
      stored: the name of the parameter that the weight is restored from.
      place: empty, on the device of the products, if that parameter stays on the host; else None.
    """

    stored: ClassVar[str]
    place: Tensor | None

    def __init__(self, layer: nn.Linear) -> None:
        nn.Module.__init__(self)  # that of nn.Linear would allocate a weight
        self.in_features = layer.in_features
        self.out_features = layer.out_features
        self.bias = layer.bias
        self.register_buffer("place", None, persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        """Multiplies by the restored weight."""
        if torch.is_grad_enabled() and input.requires_grad:
            return FrozenProduct.apply(input, self)
        return F.linear(input, self.weight, self.bias)

    def fetched(self) -> Tensor:
        """Returns the stored parameter where products are made."""
        stored = self.get_parameter(self.stored).detach()
        return stored if self.place is None else stored.to(self.place.device, non_blocking=True)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Leaves on the host what stays there, when a network moves."""
        staying = self._parameters.pop(self.stored) if self.place is not None else None
        super()._apply(fn, recurse)
        if staying is not None:
            self._parameters[self.stored] = staying
        return self


class QuantizedLinear(RestoredLinear):
    """A linear layer that keeps the codes of its weight, and their scales.

    Args:
      layer: the layer to replace; its scales have the precision of its weight.
      name: one of `GROUPS`.
    """

    stored = "codes"
    pairs: Tensor | None

    def __init__(self, layer: nn.Linear, name: str) -> None:
        super().__init__(layer)
        weight = layer.weight.detach()
        levels = _levels(name).to(weight.device)
        groups = weight.float().unflatten(1, (-1, GROUPS[name] or layer.in_features))
        scale = (groups.abs().amax(2) / levels[-1]).to(weight.dtype)
        # Codes are chosen by the rounded scale. A group of zeros has the scale 0 and any codes.
        steps = groups / scale.float().clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(2)
        codes = torch.bucketize(steps, (levels[1:] + levels[:-1]) / 2, out_int32=True).flatten(1)
        pairs = None
        if name == "int8":
            codes = (codes - 127).to(torch.int8)
        else:
            codes = (16 * codes[:, ::2] + codes[:, 1::2]).to(torch.uint8)
            padded = F.pad(levels, (0, 16 - len(levels)))
            pairs = torch.cartesian_prod(padded, padded)
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.register_buffer("pairs", pairs, persistent=False)  # byte -> both of its levels

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """Restores the weight, [out, in], in the precision of the scales."""
        scale = self.scale.detach()
        if self.pairs is None:
            values = self.fetched().to(scale.dtype)
        else:
            values = F.embedding(self.fetched().int(), self.pairs.to(scale.dtype))
        groups = values.view(*scale.shape, -1).mul_(scale.unsqueeze(2))
        return groups.view(self.out_features, self.in_features)


class FrozenProduct(torch.autograd.Function):
    """The product of a frozen layer, whose weight the backward pass asks for again."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, layer: nn.Linear) -> Tensor:
        """Computes x W^T + b."""
        ctx.layer = layer
        ctx.dtype = inputs.dtype
        return F.linear(inputs, layer.weight, layer.bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Computes the gradient of x."""
        # Autocast may have rounded inputs and weight to the precision of the product.
        weight = ctx.layer.weight.to(gradient.dtype).t()
        return F.linear(gradient, weight).to(ctx.dtype), None


def quantize_blocks(network: nn.Module, name: str, device: torch.device) -> None:
    """Puts quantized layers in place of the blocks' linear ones, one by one on a device.

    ValueError if their shapes do not allow it, or if there are none.
    """
    check_layers(network, "model.quantization", name, GROUPS[name])
    key = f"model.quantization={name}"
    replace_layers(network, key, lambda layer: QuantizedLinear(layer.to(device), name))


def replace_layers(
    network: nn.Module, key: str, make: Callable[[nn.Linear], RestoredLinear]
) -> None:
    """Replaces the blocks' plain linear layers. ValueError if the blocks have no linear ones."""
    chosen = set(quantized_layers(network))
    if not chosen:
        raise ValueError(
            f"{key}: a {type(network).__name__} has no linear layers in blocks: drop this setting"
        )
    for parent in list(network.modules()):
        for name, child in list(parent.named_children()):
            if child in chosen and not isinstance(child, RestoredLinear):
                setattr(parent, name, make(child))


def check_layers(network: nn.Module, key: str, name: str, group: int | None) -> None:
    """Raises ValueError for a layer whose rows are no whole groups."""
    for layer in quantized_layers(network):
        if group is not None and layer.in_features % group:
            raise ValueError(
                f"{key}={name} takes layers whose inputs are multiples of {group}; the model has "
                f"one of {layer.in_features}: set int8, which takes all, or null"
            )


def quantized_layers(network: nn.Module) -> list[nn.Linear]:
    """Returns the linear layers of the blocks, also those that a LoRA wraps, but not the LoRA's."""
    return [
        module
        for block in repeated_blocks(network)
        for name, module in block.named_modules()
        if isinstance(module, nn.Linear) and "lora_" not in name
    ]


def repeated_blocks(network: nn.Module) -> Iterator[nn.Module]:
    """Yields the members of the outermost module lists: a transformer's blocks, in order."""
    for child in network.children():
        yield from child if isinstance(child, nn.ModuleList) else repeated_blocks(child)


def precision(dtype: str, quantization: str | None) -> str:
    """Returns the name of a network's precision in specs and tables: `bf16`, `bf16+int8`."""
    return dtype if quantization is None else f"{dtype}+{quantization}"


def _levels(name: str) -> Tensor:
    """Returns what codes stand for, in rising order, fp32."""
    if name != "nf4":
        most = 127 if name == "int8" else 7
        return torch.arange(-most, most + 1, dtype=torch.float32)
    above, below = (
        torch.special.ndtri(torch.linspace(_OUTERMOST, 0.5, count, dtype=torch.float64))[:-1]
        for count in (9, 8)
    )
    levels = torch.cat([-below, torch.zeros(1), above.flip(0)]) / above[0]
    return levels.float()
