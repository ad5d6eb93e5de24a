"""diffusers' flow-matching scheduler with stochastic steps that have a density."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.schedulers.scheduling_flow_match_euler_discrete import (
    FlowMatchEulerDiscreteSchedulerOutput,
)
from torch import Tensor

from flowgrpo_rc.core import transition as core
from flowgrpo_rc.core.transition import Transition


def step_transition(
    x: Tensor, v: Tensor, sigmas: Tensor, steps: Tensor, *, sde_type: str, noise_level: float
) -> Transition:
    """The Gaussian of steps `steps` [B] of the schedule `sigmas` [S+1] at `x` [B, ...] with
    velocity v [B, ...].
    """
    return core.transition(
        x,
        v,
        sigmas[steps],
        sigmas[steps + 1],
        kind=sde_type,
        noise_level=noise_level,
        sigma_max=sigmas[1],
    )


class FlowMatchSDEScheduler(FlowMatchEulerDiscreteScheduler):
    """`FlowMatchEulerDiscreteScheduler` whose steps are Gaussian (see `core.transition` for the
    kinds).

    It replaces the stock one in any pipeline: `pipe.scheduler =
    FlowMatchSDEScheduler.replacing(pipe.scheduler, sde_type="sde", noise_level=0.7)`. With noise
    level 0 the images are the stock ones.
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

    def step(
        self,
        model_output: Tensor,
        timestep: float | Tensor,
        sample: Tensor,
        generator: torch.Generator | None = None,
        return_dict: bool = True,
    ) -> Any:
        """One stochastic step, called as pipelines call the stock one; the churn options of that
        have no meaning here.

        Pipelines that pass no generator (SD3 is one) draw from torch's global state.
        """
        if self.step_index is None:
            self._init_step_index(timestep)
        steps = torch.full((sample.shape[0],), self.step_index, device=sample.device)
        gaussian = step_transition(
            sample.float(),
            model_output.float(),
            self.sigmas,
            steps,
            sde_type=self.sde_type,
            noise_level=self.noise_level,
        )
        source = sample.device if generator is None else generator.device
        noise = torch.randn(sample.shape, generator=generator, device=source).to(sample.device)
        previous = core.sample(gaussian, noise).to(model_output.dtype)
        self._step_index += 1
        return (
            FlowMatchEulerDiscreteSchedulerOutput(prev_sample=previous)
            if return_dict
            else (previous,)
        )
