"""diffusers' flow-matching scheduler with stochastic steps that have a density."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteSchedulerOutput
from torch import Tensor

from flowgrpo_rc.core.transition import Transition, sample, transition


class FlowMatchSDEScheduler(FlowMatchEulerDiscreteScheduler):
    """`FlowMatchEulerDiscreteScheduler` whose steps are Gaussian (see `core.transition` for the kinds).

    It replaces the stock one in any pipeline: `pipe.scheduler = FlowMatchSDEScheduler.replacing(pipe.scheduler,
    sde_type="sde", noise_level=0.7)`. With noise level 0 the images are the stock ones.
    """

    sde_type: str
    noise_level: float

    @classmethod
    def replacing(
        cls, scheduler: FlowMatchEulerDiscreteScheduler, *, sde_type: str, noise_level: float
    ) -> FlowMatchSDEScheduler:
        """A stochastic scheduler with the schedule settings of `scheduler`."""
        new = cls.from_config(scheduler.config)
        new.sde_type, new.noise_level = sde_type, noise_level
        return new

    def transition(self, model_output: Tensor, step_indices: Tensor, latents: Tensor) -> Transition:
        """The Gaussian of steps `step_indices` [B] at `latents` [B, ...], in fp32."""
        return transition(
            latents.float(),
            model_output.float(),
            self.sigmas[step_indices],
            self.sigmas[step_indices + 1],
            kind=self.sde_type,
            noise_level=self.noise_level,
            sigma_max=self.sigmas[1],
        )

    def step(
        self,
        model_output: Tensor,
        timestep: float | Tensor,
        latents: Tensor,
        generator: torch.Generator | None = None,
        return_dict: bool = True,
    ) -> Any:
        """One stochastic step with the stock signature."""
        if self.step_index is None:
            self._init_step_index(timestep)
        indices = torch.full((latents.shape[0],), self.step_index, device=latents.device)
        source = latents.device if generator is None else generator.device
        noise = torch.randn(latents.shape, generator=generator, device=source).to(latents.device)
        previous = sample(self.transition(model_output, indices, latents), noise).to(model_output.dtype)
        self._step_index += 1
        return FlowMatchEulerDiscreteSchedulerOutput(prev_sample=previous) if return_dict else (previous,)
