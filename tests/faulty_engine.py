"""A rollout engine with a fault of choice, and silent about it unless it `admits`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from flowgrpo_rc.batch import SamplerSpec
from flowgrpo_rc.models.base import Schedule
from flowgrpo_rc.policies.flow import FlowPolicy, Trajectory, sample_trajectory
from flowgrpo_rc.rollout.base import ImageRequest, RolloutChunk
from flowgrpo_rc.rollout.diffusers_engine import DiffusersEngine

FAULTS = ("bf16_latents", "bf16_timestep", "guidance", "shifted_schedule", "lora_off", "stale_weights")


class FaultyPolicy(FlowPolicy):
    fault = ""

    def rollout(self, *args: Any, **options: Any) -> Trajectory:
        if self.fault != "shifted_schedule":
            return super().rollout(*args, **options)
        latents, conditioning, negative, spec, window, noise = args

        def velocity(x: Tensor, timesteps: Tensor) -> Tensor:
            return self._velocity(x, timesteps, conditioning, negative, spec)

        return sample_trajectory(velocity, shifted(self.model.schedule(spec)), latents, spec, window, noise, **options)

    def _velocity(self, latents: Tensor, timesteps: Tensor, *args: Any) -> Tensor:
        if self.fault == "bf16_timestep":
            timesteps = timesteps.bfloat16().float()
        return super()._velocity(latents, timesteps, *args)


def shifted(schedule: Schedule) -> Schedule:
    """With a shift of 1.2."""
    sigmas = 1.2 * schedule.sigmas / (1 + 0.2 * schedule.sigmas)
    return schedule._replace(sigmas=sigmas, timesteps=1000 * sigmas[:-1])


class FaultyEngine(DiffusersEngine):
    """fault: one of `FAULTS`, or none; admits: the batches and `held_weights` tell what really happened."""

    def __init__(self, model: Any, network: Any, *, fault: str = "", admits: bool = False, **options: Any) -> None:
        super().__init__(model, network, **options)
        assert fault in ("", *FAULTS)
        self._fault, self._admits = fault, admits
        self._policy = FaultyPolicy(model, self.transformer)
        self._policy.fault = fault
        self._last: Mapping[str, Tensor] | None = None
        if fault == "lora_off":
            self.transformer.disable_adapters()

    def generate(self, request: ImageRequest) -> Iterator[RolloutChunk]:
        asked = request.spec
        if self._fault == "guidance":
            request = replace(request, spec=replace(asked, guidance_scale=1.01 * asked.guidance_scale))
        for chunk in super().generate(request):
            yield chunk if self._admits else replace(chunk, batch=self._disguised(chunk.batch, asked))

    def _disguised(self, batch: Any, asked: SamplerSpec) -> Any:
        schedule = self._model.schedule(asked)
        latents = batch.all_latents
        if self._fault == "bf16_latents":
            latents = latents.bfloat16().float()
        return batch.replace(
            all_latents=latents,
            spec=replace(batch.spec, guidance_scale=asked.guidance_scale),
            sigmas=schedule.sigmas,
            all_timesteps=schedule.timesteps[batch.step_indices],
        )

    def sync_weights(self, state: Mapping[str, Tensor], version: int) -> None:
        now = {name: tensor.clone() for name, tensor in state.items()}
        stale = self._last if self._fault == "stale_weights" and self._last is not None else now
        super().sync_weights(stale, version)
        self._last = now

    def held_weights(self) -> Mapping[str, Tensor] | None:
        return super().held_weights() if self._admits else None
