"""The operations of a step against those of every product, and against a count by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.plans import job
from torch import nn
from torch.nn import functional as F

from flowgrpo_rc.models.base import FlowModel
from flowgrpo_rc.planning.activations import blank_inputs
from flowgrpo_rc.planning.work import ASSUMED, Operations, operations, told


@pytest.mark.parametrize("guidance", ["1.0", "3.0"])
def test_a_forward_is_the_sum_of_its_products(
    model: FlowModel, monkeypatch: pytest.MonkeyPatch, guidance: str
) -> None:
    run = job("rollout.dtype=bf16", f"rollout.pipeline.guidance_scale={guidance}")
    found = 0

    def linear(module: nn.Linear, given: tuple[torch.Tensor], _: Any) -> None:
        nonlocal found
        found += 2 * given[0].numel() * module.out_features

    def convolution(module: nn.Conv2d, _: Any, made: torch.Tensor) -> None:
        nonlocal found
        found += 2 * made.numel() * module.weight[0].numel()

    def attention(query: torch.Tensor, key: torch.Tensor, *rest: Any, **options: Any) -> Any:
        nonlocal found
        found += 4 * query.numel() * key.shape[-2]
        return attend(query, key, *rest, **options)

    attend = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    for module in model.transformer.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(linear)
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(convolution)
    spec = run.config.rollout.spec()
    latents, _, conditioning, negative = blank_inputs(model, 1, spec)
    with torch.no_grad():
        times = torch.zeros(1)
        model.velocity(model.transformer, latents, times, conditioning, negative, spec)
    forwards = 1 if guidance == "1.0" else 2
    counted = operations(run)
    tokens = 2 * 32 * 64  # no fewer than those of a picture and its prompt
    assert found / forwards <= counted.forward <= found / forwards + 2 * run.trained * tokens
    assert 1.9 < counted.update / counted.forward < 3


def test_a_step() -> None:
    passes = Operations(forward=10, update=25)

    def found(*overrides: str) -> int:
        sizes = ("rollout.algo.tail_steps=null", "data.train_batch_size=2", "rollout.n=12")
        return passes.of_a_step(job("rollout.dtype=bf16", *sizes, *overrides))

    sampled = 24 * 10
    assert found("actor.train_n=6") == sampled * 10 + 12 * 3 * 25
    trained = 24 * 3
    every = "actor.train_n=null"
    assert found(every) == sampled * 10 + trained * 25
    again = found(every, "model.gradient_checkpointing=true")
    assert again == sampled * 10 + trained * (25 + 10)
    with_kl = found(every, "actor.use_kl_loss=true", "actor.kl_loss_coef=0.1")
    assert with_kl == (sampled + trained) * 10 + trained * 25


def test_what_a_plan_tells() -> None:
    assert told(int(0.01 * ASSUMED))[1] == "4.00 TFLOP"
    assert told(int(3 * ASSUMED))[1:] == (
        "1.2 PFLOP",
        "of the transformer in a step; 3 s at 400 TFLOP a second, which is assumed",
    )
