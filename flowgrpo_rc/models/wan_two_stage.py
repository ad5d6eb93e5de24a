"""Wan 2.2 A14B, text to video with a transformer for each part of the schedule
(https://github.com/Wan-Video/Wan2.2).

Legend: B samples, S denoising steps.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from flowgrpo_rc.batch import Conditioning, SamplerSpec
from flowgrpo_rc.models.layout import in_groups
from flowgrpo_rc.models.networks import Networks
from flowgrpo_rc.models.wan import Wan


class WanTwoStage(Wan):
    """Wan with two transformers: `transformer` down to the boundary, `transformer_2` below it.

    The boundary is the timestep boundary_ratio x num_train_timesteps of the checkpoint. Each
    transformer has a LoRA of its own, which learns from the steps on its side alone, and a scale of
    guidance: guidance_scale, and guidance_scale_2 below the boundary.
    """

    networks = ("transformer", "transformer_2")
    unsupported_components: ClassVar[Mapping[str, str]] = {}

    @property
    def boundary(self) -> float:
        """Returns the lowest timestep of the first transformer."""
        ratio: float = self.pipeline.config.boundary_ratio
        return ratio * float(self.pipeline.scheduler.config.num_train_timesteps)

    def networks_of_steps(self, spec: SamplerSpec) -> list[str]:
        """Returns `transformer` for the steps down to the boundary, `transformer_2` for others."""
        scheduler = self.scheduler
        scheduler.set_timesteps(spec.num_inference_steps, device="cpu")
        return [self.networks[0 if high else 1] for high in scheduler.timesteps >= self.boundary]

    def velocity(
        self,
        transformer: nn.Module,
        latents: Tensor,
        timesteps: Tensor,
        conditioning: Conditioning,
        negative: Conditioning | None,
        spec: SamplerSpec,
    ) -> Tensor:
        """Predicts the velocity of each row with the transformer of its timestep."""
        if not isinstance(transformer, Networks):
            return super().velocity(transformer, latents, timesteps, conditioning, negative, spec)
        scale = spec.guidance_scale_2
        specs = spec, spec if scale is None else replace(spec, guidance_scale=scale)
        sides = list(transformer.networks.values())
        predict = super().velocity
        # The host has to know which transformer to run; without its own copy it waits here.
        known = torch.tensor(conditioning.timesteps) if conditioning.timesteps else timesteps
        num_high = int((known >= self.boundary).sum())
        if num_high in (0, len(timesteps)):
            side = 0 if num_high else 1
            inputs = latents, timesteps, conditioning, negative
            return predict(sides[side], *inputs, specs[side])
        order = (timesteps < self.boundary).int().argsort(stable=True)

        def on_side(side: int, rows: Tensor) -> Tensor:
            other = None if negative is None else negative[rows]
            inputs = latents[rows], timesteps[rows], conditioning[rows], other
            return predict(sides[side], *inputs, specs[side])

        return in_groups((order[:num_high], order[num_high:]), on_side)
