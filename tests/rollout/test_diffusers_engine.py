"""The diffusers engine: what a batch holds, and that it does not depend on the chunks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.image_rollouts import WINDOWS, make_spec, sample_images, trained_lora

from flowgrpo_rc.core.random import normal
from flowgrpo_rc.models.base import FlowModel


@pytest.mark.kernels
def test_samples_do_not_depend_on_the_chunk(model: FlowModel) -> None:
    transformer = trained_lora(model)
    spec = make_spec("sde", 1.0)
    together, images = sample_images(model, transformer, spec, WINDOWS["per_sample"])
    alone, images_alone = sample_images(model, transformer, spec, WINDOWS["per_sample"], chunk=1)
    torch.testing.assert_close(together.all_latents, alone.all_latents, atol=1e-5, rtol=0)
    assert np.abs(images.astype(int) - images_alone.astype(int)).max() <= 1
    assert torch.equal(together.step_indices, alone.step_indices)


def test_batch_holds_what_was_sampled(model: FlowModel) -> None:
    transformer = trained_lora(model)
    spec = make_spec("sde", 1.0)
    batch, images = sample_images(model, transformer, spec, WINDOWS["per_sample"])
    assert images.shape == (4, 32, 64, 3)
    assert images.dtype == np.uint8
    assert batch.all_latents.shape == (4, 3, 8, 8, 16)
    assert batch.group.tolist() == [0, 0, 1, 1]
    assert batch.policy_version.tolist() == [3] * 4
    assert batch.spec == spec
    schedule = model.schedule(spec)
    assert torch.equal(batch.all_timesteps, schedule.timesteps[batch.step_indices])
    # Sample 0 starts at step 0: its first state is the initial noise, bit for bit.
    assert torch.equal(batch.all_latents[0, 0], normal((8, 8, 16), [11], "latents")[0])
