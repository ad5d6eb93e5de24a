"""Kernels of a transformer on a CPU beside those of torch and diffusers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers.models.activations import GELU
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.attention_processor import Attention
from torch import Tensor, nn
from torch.nn import functional as F

from flowgrpo_rc.models import cpu_kernels
from flowgrpo_rc.models.cpu_kernels import SCORES, SHORT, TanhGELU, attention, use_cpu_kernels

SHAPES = [(SCORES // (4 * 64 * 64) + 3, 4, 64, 64, 32), (1, 1, 5, 9, 8), (2, 3, SHORT, 7, 16)]


@pytest.fixture(autouse=True)
def with_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes attention's own form on a CPU without bf16 units, too."""
    if not cpu_kernels._HAS_BF16:
        monkeypatch.setattr(cpu_kernels, "_HAS_BF16", True)
        monkeypatch.setattr(TanhGELU, "forward", GELU.forward)  # which oneDNN does not have there


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    source = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=source).to(dtype).requires_grad_()


def with_gradients(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    found = function(*inputs)
    source = torch.Generator().manual_seed(9)
    slope = torch.randn(found.shape, generator=source).to(found.dtype)
    return [found.detach(), *torch.autograd.grad(found, inputs, slope)]


def errors(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    pairs = zip(found, exact, strict=True)
    return [float((a.double() - b).norm() / b.norm()) for a, b in pairs]


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("shape", SHAPES)
def test_short_attention_is_as_exact_as_torchs(
    shape: tuple[int, int, int, int, int], scale: float | None
) -> None:
    rows, heads, queries, keys, width = shape
    inputs = [drawn(rows, heads, n, width, seed=n) for n in (queries, keys, keys)]

    def torchs(*given: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*given, scale=scale)

    assert cpu_kernels._is_short(*inputs[:2], {"scale": scale})
    found = with_gradients(lambda *given: attention(*given, scale=scale), *inputs)
    exact = with_gradients(torchs, *(x.detach().double().requires_grad_() for x in inputs))
    for own, theirs in zip(
        errors(found, exact), errors(with_gradients(torchs, *inputs), exact), strict=True
    ):
        assert own < 1.5 * theirs + 1e-3
    with torch.no_grad():
        assert torch.equal(attention(*inputs, scale=scale), found[0])


@pytest.mark.parametrize("change", ["long", "fp32", "mask", "causal", "grouped"])
def test_other_attention_is_torchs(change: str) -> None:
    tokens = SHORT + 1 if change == "long" else 8
    dtype = torch.float32 if change == "fp32" else torch.bfloat16
    query = drawn(2, 4, tokens, 16, dtype=dtype)
    key = drawn(2, 2 if change == "grouped" else 4, tokens, 16, dtype=dtype)
    options: dict[str, Any] = {
        "mask": {"attn_mask": torch.arange(tokens)[None] < 5},
        "causal": {"is_causal": True},
        "grouped": {"enable_gqa": True},
    }.get(change, {})
    wanted = F.scaled_dot_product_attention(query, key, key, **options)
    assert torch.equal(attention(query, key, key, **options), wanted)
    rows = [x.transpose(1, 2) for x in (query, key, key)]
    assert torch.equal(
        cpu_kernels._dispatched(*rows, **options), dispatch_attention_fn(*rows, **options)
    )


def test_a_layer_with_its_gelu_is_as_exact_as_torchs() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        plain = GELU(16, 64, approximate="tanh").bfloat16().requires_grad_(False)
    own = copy.deepcopy(plain)
    use_cpu_kernels(nn.Sequential(own))
    assert type(own) is TanhGELU
    x = (10 * drawn(3, 5, 16)).detach().requires_grad_()
    exact = with_gradients(copy.deepcopy(plain).double(), x.detach().double().requires_grad_())
    found = with_gradients(own, x)
    for ours, theirs in zip(
        errors(found, exact), errors(with_gradients(plain, x), exact), strict=True
    ):
        assert ours < 1.2 * theirs + 1e-7
    with torch.no_grad():
        assert torch.equal(own(x), found[0])
    weight = own.proj.weight.requires_grad_()
    torch.autograd.grad(own(x).sum(), weight)  # a layer that trains is torch's


def test_the_layer_behind_attention_gets_its_tokens_without_gaps() -> None:
    """Or torch would copy the weight once for each sample."""
    layer, seen = Attention(query_dim=16, heads=2, dim_head=8), []
    use_cpu_kernels(nn.Sequential(layer))
    behind = layer.to_out[0]
    behind.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    part = drawn(2, 6, 16, dtype=torch.float32)[:, :4]
    behind(part)
    assert seen[0].is_contiguous()
    assert not part.is_contiguous()
    assert torch.equal(seen[0], part)
