"""Reverse steps by index in a schedule, and a scheduler for diffusers that takes them.

Legend: B samples, S denoising steps of the schedule.
"""

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
    """Computes the Gaussian of reverse steps that are given by their index.

    Sigmas are always taken by index from one schedule, so that sampling and re-evaluation use the
    same bits.

    Args:
      x: the state, [B, ...].
      v: the velocity at x, [B, ...].
      sigmas: the schedule, [S+1], decreasing to 0.
      steps: index of each sample's step, int64, [B].
      sde_type: a kind of `core.transition`.
      noise_level: scale of the noise; 0 for a deterministic step.

    Returns:
      The Gaussian of the next state; `core.transition.transition` has the formulas.

    Raises:
      ValueError: the kind is unknown.
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
    """A `FlowMatchEulerDiscreteScheduler` whose steps are drawn from Gaussians.

    It takes the place of the stock scheduler in any pipeline:

        pipe.scheduler = FlowMatchSDEScheduler.replacing(
            pipe.scheduler, sde_type="sde", noise_level=0.7
        )

    With noise level 0 the steps are deterministic, and the images are the stock ones.
    """

    sde_type: str  # a kind of `core.transition`
    noise_level: float

    @classmethod
    def replacing(
        cls, scheduler: FlowMatchEulerDiscreteScheduler, *, sde_type: str, noise_level: float
    ) -> "FlowMatchSDEScheduler":
        """Returns a stochastic scheduler with the settings of another scheduler.

        Args:
          scheduler: the scheduler whose schedule is kept.
          sde_type: a kind of `core.transition`.
          noise_level: scale of the noise; 0 for deterministic steps.

        Returns:
          A new scheduler.
        """
        new = cls.from_config(scheduler.config)
        new.sde_type = sde_type
        new.noise_level = noise_level
        return new

    def step(
        self,
        model_output: Tensor,
        timestep: float | Tensor,
        sample: Tensor,
        generator: torch.Generator | None = None,
        return_dict: bool = True,
    ) -> Any:
        """Takes one stochastic step. Pipelines call it as they call the stock method.

        The stock method's options for churn do not exist here.

        Args:
          model_output: the velocity, [B, ...].
          timestep: the timestep of the step; only the first one of a pipeline call is looked at.
          sample: the state, [B, ...].
          generator: draws the noise; None for torch's global state, which SD3's pipeline uses.
          return_dict: return an output object in place of a tuple.

        Returns:
          The next state, in the precision of `model_output`.
        """
        if self.step_index is None:
            self._init_step_index(timestep)
        steps = torch.full((sample.shape[0],), self.step_index, device=sample.device)
        # In fp32 as in training: bf16 would round the noise away from its Gaussian.
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
        if not return_dict:
            return (previous,)
        return FlowMatchEulerDiscreteSchedulerOutput(prev_sample=previous)
