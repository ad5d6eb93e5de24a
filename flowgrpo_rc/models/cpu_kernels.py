"""Kernels of a transformer on a CPU, where torch's own are slow for short sequences.

They compute what the layers of diffusers compute. Which one is taken follows from precision, shape
and processor alone, so a resumed run, a worker and a replay take the same.
"""

from collections.abc import Mapping
from functools import cache
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from diffusers.models.activations import GELU
from diffusers.models.attention import AttentionModuleMixin
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.attention_processor import Attention
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

SHORT = 256  # tokens up to which attention with all scores in memory was measured as faster
SCORES = 2**18  # of the samples that are attended at once; more leave the cache
_BEHIND_ATTENTION = ("to_out", "to_out.0", "to_add_out")
_HAS_BF16 = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def use_cpu_kernels(network: nn.Module) -> None:
    """Gives the layers of a transformer their kernels; a LoRA comes later and stays."""
    for module in network.modules():
        if isinstance(module, Attention | AttentionModuleMixin):
            processor: Any = module.processor
            kind: Any = type(processor)
            processor.__class__ = _with_short_attention(kind)
            for name, layer in module.named_modules():
                if name in _BEHIND_ATTENTION and isinstance(layer, nn.Linear):
                    layer.register_forward_pre_hook(_contiguous)
        elif type(module) is GELU and module.approximate == "tanh":
            module.__class__ = TanhGELU


def attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Computes what `scaled_dot_product_attention` does, with its options, [B, heads, tokens, D].

    In bf16 a short sequence without a mask is two products with a softmax between them.
    """
    if not _is_short(query, key, options):
        return F.scaled_dot_product_attention(query, key, value, **options)
    scale = options.get("scale") or query.shape[-1] ** -0.5
    size = max(1, SCORES // (query.shape[1] * query.shape[2] * key.shape[2]))
    if torch.compiler.is_compiling():  # which wants one graph for all batches
        size = len(query)
    parts = []
    for rows in zip(query.split(size), key.split(size), value.split(size), strict=True):
        q, k, v = (x.flatten(0, 1) for x in rows)
        scores = torch.baddbmm(q.new_empty(1), q, k.mT, beta=0, alpha=scale)
        parts.append(torch.bmm(scores.softmax(-1), v).unflatten(0, rows[0].shape[:2]))
    return torch.cat(parts)


def _dispatched(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    """Does what `dispatch_attention_fn` of diffusers does, [B, tokens, heads, D]."""
    rows = [x.transpose(1, 2) for x in (query, key, value)]
    if not _is_short(rows[0], rows[1], options):
        return dispatch_attention_fn(query, key, value, **options)
    return attention(*rows, scale=options.get("scale")).transpose(1, 2)


def _is_short(query: Tensor, key: Tensor, options: Mapping[str, Any]) -> bool:
    """Returns whether attention is one of a short sequence, without an option but a scale."""
    others = (given for name, given in options.items() if name != "scale")
    plain = not any(isinstance(given, Tensor) or given for given in others)
    short = max(query.shape[-2], key.shape[-2]) <= SHORT
    return plain and short and _HAS_BF16 and query.dtype == key.dtype == torch.bfloat16


@cache
def _with_short_attention(processor: Any) -> Any:
    """Makes a subclass of a processor whose own code finds `attention` under torch's name."""
    call: Any = processor.__call__
    # Without the name of its module, where torch.compile would look these names up.
    found = {name: value for name, value in call.__globals__.items() if name != "__name__"}
    found["F"] = SimpleNamespace(**{**vars(F), "scaled_dot_product_attention": attention})
    found["dispatch_attention_fn"] = _dispatched
    own = FunctionType(call.__code__, found, call.__name__, call.__defaults__, call.__closure__)
    own.__kwdefaults__ = call.__kwdefaults__
    return type(processor.__name__, (processor,), {"__call__": own})


def _contiguous(layer: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
    """Copies a slice of tokens, for which torch would copy the weight once for each sample."""
    return (inputs[0].contiguous(),)


class TanhGELU(GELU):
    """A linear layer with the tanh form of GELU; in bf16 oneDNN makes both at once."""

    def forward(self, hidden_states: Tensor) -> Any:
        """Computes GELU(x W^T + b)."""
        layer = self.proj
        if hidden_states.dtype == torch.bfloat16 and isinstance(layer, nn.Linear):
            weight = layer.weight
            frozen = type(weight) in (Tensor, nn.Parameter) and not weight.requires_grad
            takes = _HAS_BF16 and weight.dtype == torch.bfloat16
            if frozen and takes and not torch.compiler.is_compiling():
                return _LinearGELU.apply(hidden_states, weight, layer)
        return super().forward(hidden_states)


class _LinearGELU(torch.autograd.Function):
    """The backward pass makes the product anew, which takes less time than GELU did.

    It takes the weight from the layer, so that no graph keeps one that was restored.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: nn.Linear) -> Any:
        ctx.save_for_backward(x)
        ctx.layer = layer
        return torch.ops.mkldnn._linear_pointwise(x, weight, layer.bias, "gelu", [], "tanh")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        weight = ctx.layer.weight
        product = F.linear(ctx.saved_tensors[0], weight, ctx.layer.bias)
        slope = torch.ops.aten.gelu_backward(gradient, product, approximate="tanh")
        return slope @ weight, None, None
