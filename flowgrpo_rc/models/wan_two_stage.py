"""Wan 2.2 A14B, text to video with a transformer for each part of the schedule
(https://github.com/Wan-Video/Wan2.2).

Legend: B samples, S denoising steps.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from flowgrpo_rc.batch import Conditioning, SamplerSpec
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

    def _check_boundary(self) -> None:
        if self.pipeline.config.boundary_ratio is None:
            raise ValueError(
                "model.path: its model_index.json has a transformer_2 and no boundary_ratio, so "
                "the stock pipeline would never use it; set boundary_ratio, or set transformer_2 "
                "to [null, null]"
            )

    def networks_of_steps(self, spec: SamplerSpec) -> list[str]:
        """Returns `transformer` for the steps down to the boundary, `transformer_2` for others."""
        scheduler = self.scheduler
        scheduler.set_timesteps(spec.num_inference_steps, device="cpu")
        return [self.networks[0 if high else 1] for high in scheduler.timesteps >= self.boundary]

    def velocity(
        self,
        transformer: Any,
        latents: Tensor,
        timesteps: Tensor,
        conditioning: Conditioning,
        negative: Conditioning | None,
        spec: SamplerSpec,
    ) -> Tensor:
        """Predicts the velocity of each row with the transformer of its timestep."""
        if not isinstance(transformer, Networks):
            return super().velocity(transformer, latents, timesteps, conditioning, negative, spec)
        second_scale = spec.guidance_scale_2
        if second_scale is None:
            second_scale = spec.guidance_scale
        first, second = transformer.networks.values()
        # The host has to know which transformer to run; without its own copy it waits here.
        known = torch.tensor(conditioning.timesteps) if conditioning.timesteps else timesteps
        num_high = int((known >= self.boundary).sum())
        order = (timesteps < self.boundary).int().argsort(stable=True)
        sides = (
            (first, order[:num_high], spec),
            (second, order[num_high:], replace(spec, guidance_scale=second_scale)),
        )
        parts = [side for side in sides if len(side[1])]
        if len(parts) == 1:
            ((part, _, own),) = parts
            return super().velocity(part, latents, timesteps, conditioning, negative, own)
        # Evaluated apart, so the same rows give other last bits than in a batch on one side.
        velocities = [
            super(WanTwoStage, self).velocity(
                part,
                latents[rows],
                timesteps[rows],
                conditioning[rows],
                None if negative is None else negative[rows],
                own,
            )
            for part, rows, own in parts
        ]
        return torch.cat(velocities)[order.argsort()]
