"""Held-out prompts are encoded once in a run, and what is kept gives the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

import numpy as np
import pytest
import torch
from support.image_rollouts import make_spec

from flowgrpo_rc.batch import Conditioning, Prompt
from flowgrpo_rc.models.base import FlowModel
from flowgrpo_rc.policies.encode_prompts import KnownPrompts, encode_prompts
from flowgrpo_rc.policies.flow import FlowPolicy
from flowgrpo_rc.rollout.config import EvaluationConfig, PipelineConfig, RolloutConfig
from flowgrpo_rc.training.tasks.image import ImageTask

PROMPTS = [
    Prompt(text="A", index=0),
    Prompt(text="B", index=1, negative_text="dim"),
    Prompt(text="A", index=2),
]


@pytest.fixture
def calls(model: FlowModel) -> Iterator[list[int]]:
    """Notes how many texts a text encoder is given each time."""
    found: list[int] = []
    hook = model.pipeline.text_encoder.register_forward_pre_hook(
        lambda _, inputs: found.append(len(inputs[0]))
    )
    yield found
    hook.remove()


def assert_same(found: Conditioning | None, expected: Conditioning | None) -> None:
    if expected is None:
        assert found is None
        return
    assert found is not None
    for field in fields(Conditioning):
        ours, theirs = getattr(found, field.name), getattr(expected, field.name)
        same = torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs
        assert same, field.name


@pytest.mark.parametrize("guidance", [1.0, 4.5])
def test_a_batch_is_encoded_once(model: FlowModel, calls: list[int], guidance: float) -> None:
    spec = make_spec("sde", guidance)
    known = KnownPrompts(model, spec)
    once = [2, 2] if guidance > 1 else [2]  # distinct prompts, and negatives
    for prompts, expected in ((PROMPTS, once), (PROMPTS, []), (PROMPTS[:2], once)):
        calls.clear()
        found = known.encode(prompts)
        assert calls == expected
        for ours, theirs in zip(found, encode_prompts(model, prompts, spec), strict=True):
            assert_same(ours, theirs)


def test_what_goes_beyond_the_limit_is_encoded_each_time(
    model: FlowModel, calls: list[int]
) -> None:
    spec = make_spec("sde", 1.0)
    size = sum(tensor.nbytes for tensor in vars_of(encode_prompts(model, PROMPTS[:1], spec)[0]))
    known = KnownPrompts(model, spec, limit=size)
    calls.clear()
    for _ in range(3):
        known.encode(PROMPTS[:1])
        known.encode(PROMPTS[1:])
    assert calls == [1, 2, 2, 2]


def vars_of(conditioning: Conditioning) -> list[torch.Tensor]:
    values = (getattr(conditioning, field.name) for field in fields(Conditioning))
    return [value for value in values if isinstance(value, torch.Tensor)]


SEEDS = range(len(PROMPTS))


def test_evaluations_after_the_first_call_no_encoder(model: FlowModel, calls: list[int]) -> None:
    config = RolloutConfig(
        pipeline=PipelineConfig(height=16, width=32, num_inference_steps=2),
        val_kwargs=EvaluationConfig(num_inference_steps=2, guidance_scale=2.0),
    )
    task = ImageTask(model, FlowPolicy(model, model.network), config, seed=0)
    first = task.sample(PROMPTS, SEEDS)
    assert len(calls) == 2
    again = task.sample(PROMPTS, SEEDS)
    assert len(calls) == 2
    assert np.array_equal(first.samples, again.samples)
