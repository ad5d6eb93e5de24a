"""Faults of the guidance of a model whose scale begins at 0: Z-Image."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from support.image_rollouts import trained_lora
from support.subjects import make_subject

from flowgrpo_rc.batch import Prompt, PromptBatch
from flowgrpo_rc.calibration.faults import Lora, Replay
from flowgrpo_rc.calibration.measure import Copy, RecordedRollout, other_guidance, sample
from flowgrpo_rc.calibration.record import check_record
from flowgrpo_rc.models.base import FlowModel
from flowgrpo_rc.models.lora import lora_parameters
from flowgrpo_rc.rollout.diffusers_engine import DiffusersEngine
from flowgrpo_rc.rollout.engine import ImageRequest

ASKED = 4.0
ROWS = 4


class Job(NamedTuple):
    model: FlowModel
    engine: DiffusersEngine
    lora: Lora
    request: ImageRequest

    def sampled_with(self, guidance: float) -> RecordedRollout:
        """Returns what an engine records that takes another guidance than it says."""
        spec = replace(self.request.spec, guidance_scale=guidance)
        found = sample(self.engine, replace(self.request, spec=spec))
        return RecordedRollout(
            request=self.request, batch=found.batch.replace(spec=self.request.spec)
        )


@pytest.fixture(scope="module")
def job(saved: Callable[[str], Path]) -> Job:
    subject = make_subject("ZImagePipeline", saved)
    model = subject.load()
    network = trained_lora(model)
    state = {name: p.detach().clone() for name, p in lora_parameters(network).items()}
    prompts = [Prompt(text=text, index=i, target="") for i, text in enumerate(("AB7X", "HI"))]
    request = ImageRequest(
        prompts=PromptBatch(step=0, prompts=prompts, slots=[0, 1]),
        samples_per_prompt=2,
        spec=subject.tiny.spec("sde", {"guidance_scale": ASKED}),
        window=torch.arange(2).expand(ROWS, 2),
        seeds=list(range(ROWS)),
        decode=False,
    )
    engine = DiffusersEngine(model, network, dtype="fp32", chunk_size=ROWS)
    engine.sync_weights(state, version=2)
    return Job(model, engine, Lora(state, state, state), request)


def replay(job: Job, rollout: RecordedRollout) -> Replay:
    return Replay(Copy(job.model, "fp32", ROWS), rollout, job.lora, lora_scale=2.0)


def test_dropped_guidance_is_named_by_the_keys_own_values(job: Job) -> None:
    rollout = job.sampled_with(0.0)
    assert rollout.batch.negative is None
    ((cause, sentence),) = check_record(rollout, job.model, version=2)
    assert cause == "guidance"
    assert sentence.startswith("guidance dropped: guidance_scale 0 in place of 4")
    negative = job.sampled_with(ASKED).batch.negative
    with_negative = RecordedRollout(
        request=job.request, batch=rollout.batch.replace(negative=negative)
    )
    found = replay(job, with_negative)
    assert found.as_recorded > 1e-4
    dropped = next(trial for trial in found.trials() if "dropped" in trial.fault)
    assert (dropped.fault, dropped.residual) == (
        "guidance dropped: guidance_scale 0 in place of 4",
        0,
    )


def test_another_guidance_is_fitted(job: Job) -> None:
    found = replay(job, job.sampled_with(5.0)).guidance_trial("guidance_scale", fitted=True)
    assert found.fault == "guidance_scale 5 in place of 4"
    assert found.residual < 1e-6


def test_the_other_guidance_of_a_guided_sampler_is_none(job: Job) -> None:
    unguided = other_guidance(job.model, job.request.spec)
    assert unguided.guidance_scale == 0
    assert other_guidance(job.model, unguided).guidance_scale > 0
