"""Samples of a prompt that start from the same noise: what they share is evaluated once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.image_rollouts import make_spec, sample_images, trained_lora

from flowgrpo_rc.batch import DiffusionBatch
from flowgrpo_rc.models.base import FlowModel
from flowgrpo_rc.models.lora import lora_parameters
from flowgrpo_rc.policies.flow import FlowPolicy, distinct_rows

WINDOWS = [[1, 2], [1, 2], [2, 3], [2, 3]]  # of two samples of each of two prompts


def shared(kind: str = "sde", guidance: float = 4.5, **changes: object):
    return make_spec(kind, guidance, shared_prefix=True, **changes)


def test_samples_of_a_prompt_differ_from_the_first_step_of_their_window(model: FlowModel):
    batch, _ = sample_images(model, trained_lora(model), shared(), WINDOWS)
    first = batch.all_latents[:, 0]
    assert torch.equal(first[0], first[1])
    assert torch.equal(first[2], first[3])
    assert not torch.equal(first[0], first[2])
    after = batch.all_latents[:, 1]
    assert not torch.equal(after[0], after[1])


@pytest.mark.parametrize(("kind", "guidance"), [("sde", 4.5), ("cps", 1.0)])
def test_fp32_replay_is_bitwise_exact(model: FlowModel, kind: str, guidance: float):
    transformer = trained_lora(model)
    batch, _ = sample_images(model, transformer, shared(kind, guidance), [[1, 2]])
    replayed = FlowPolicy(model, transformer).log_probs(batch, 4)
    assert torch.equal(replayed, batch.rollout_log_probs)


def gradients(model: FlowModel, transformer: torch.nn.Module, batch: DiffusionBatch):
    policy = FlowPolicy(model, transformer)
    weights = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    for t in range(batch.num_steps):
        (policy.evaluate(batch.step(t)).log_probs[:, 0] * weights).sum().backward()
    parameters = lora_parameters(transformer)
    found = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
    transformer.zero_grad()
    return found


@pytest.mark.kernels
def test_sharing_changes_neither_log_probs_nor_gradients_but_by_rounding(model: FlowModel):
    transformer = trained_lora(model)
    batch, _ = sample_images(model, transformer, shared(), WINDOWS)
    apart = batch.replace(spec=replace(batch.spec, shared_prefix=False))
    policy = FlowPolicy(model, transformer)
    torch.testing.assert_close(
        policy.log_probs(batch, 4), policy.log_probs(apart, 4), rtol=0, atol=1e-6
    )
    together, alone = (gradients(model, transformer, one) for one in (batch, apart))
    assert together.keys() == alone.keys()
    for name, gradient in together.items():
        torch.testing.assert_close(gradient, alone[name], rtol=1e-3, atol=1e-5)


def test_the_network_sees_a_shared_state_once(model: FlowModel, monkeypatch):
    transformer = trained_lora(model)
    seen: list[int] = []
    stock = transformer.forward

    def counted(*args, **named):
        seen.append(len(named["hidden_states"]))
        return stock(*args, **named)

    monkeypatch.setattr(transformer, "forward", counted)
    batch, _ = sample_images(model, transformer, shared(guidance=1.0), [[1, 2]])
    seen.clear()
    FlowPolicy(model, transformer).log_probs(batch, 4)
    assert seen == [2, 4]


def test_rows_with_the_state_of_their_groups_first_row_are_dropped():
    states = torch.tensor([[1.0, 2.0], [1.0, 2.0], [1.0, 3.0], [1.0, 2.0], [1.0, 2.0]])
    rows, place = distinct_rows(states, torch.tensor([7, 7, 7, 4, 4]))
    assert rows.tolist() == [0, 2, 3]
    assert place.tolist() == [0, 0, 1, 2, 2]
