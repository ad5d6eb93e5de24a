"""With the LoRA switched off, the model is the base model."""

from __future__ import annotations

import torch
from support.image_rollouts import make_spec, trained_lora

from flowgrpo_rc.models.base import FlowModel
from flowgrpo_rc.models.lora import reference_policy


def test_reference_policy_is_the_base_model_bitwise(model: FlowModel) -> None:
    latents = torch.randn(2, 8, 8, 16, generator=torch.Generator().manual_seed(0))
    timesteps = torch.tensor([900.0, 10.0])
    conditioning = model.encode(["a", "b"], max_sequence_length=16)
    arguments = (latents, timesteps, conditioning, None, make_spec("sde", 1.0))
    with torch.no_grad():
        base = model.velocity(model.transformer, *arguments)
        transformer = trained_lora(model)
        trained = model.velocity(transformer, *arguments)
        with reference_policy(transformer):
            reference = model.velocity(transformer, *arguments)
        again = model.velocity(transformer, *arguments)
    assert torch.equal(reference, base)
    assert torch.equal(trained, again)
    assert not torch.allclose(trained, base)
