"""Diffusers engines with one fault each.

The fault is hidden: the record says what an engine without a fault would record. A run names them
by path, `rollout.name=support.faulty_engines.StaleWeights`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flowgrpo_rc.models.base import Schedule
from flowgrpo_rc.policies import flow
from flowgrpo_rc.rollout.diffusers_engine import DiffusersEngine
from flowgrpo_rc.rollout.engine import ImageRequest, RolloutChunk


class Recorded(DiffusersEngine):
    """Changes what is recorded."""

    def generate(self, request: ImageRequest) -> Iterator[RolloutChunk]:
        for chunk in super().generate(request):
            yield replace(chunk, batch=self.record(chunk.batch))

    def record(self, batch: Any) -> Any:
        raise NotImplementedError


class Bf16Latents(Recorded):
    def record(self, batch: Any) -> Any:
        return batch.replace(all_latents=batch.all_latents.bfloat16().float())


class LateLogProbs(Recorded):
    """Records each log-prob one step too late."""

    def record(self, batch: Any) -> Any:
        return batch.replace(rollout_log_probs=batch.rollout_log_probs.roll(-1, 1))


class NanLogProbs(Recorded):
    """One step overflows."""

    step = 1
    value = float("nan")

    def record(self, batch: Any) -> Any:
        log_probs = batch.rollout_log_probs.clone()
        log_probs[:, self.step] = self.value
        return batch.replace(rollout_log_probs=log_probs)


class InfLogProbs(NanLogProbs):
    step = 2
    value = float("-inf")


class OtherSettings(DiffusersEngine):
    """Samples with changed settings, and records the ones asked for."""

    def generate(self, request: ImageRequest) -> Iterator[RolloutChunk]:
        honest = self._model.schedule(request.spec)
        window = request.window
        start = 0
        for chunk in super().generate(self.changed(request)):
            batch = chunk.batch
            steps = window[start : start + len(batch)]
            start += len(batch)
            fields = {
                "step_indices": steps,
                "all_timesteps": honest.timesteps[steps],
                "sigmas": honest.sigmas,
            }
            spec = replace(request.spec, dtype=batch.spec.dtype)
            yield replace(chunk, batch=batch.replace(spec=spec, **fields))

    def changed(self, request: ImageRequest) -> ImageRequest:
        return request


class Guidance(OtherSettings):
    """Samples with 1% more guidance."""

    def changed(self, request: ImageRequest) -> ImageRequest:
        return replace(
            request, spec=replace(request.spec, guidance_scale=1.01 * request.spec.guidance_scale)
        )


class LateWindow(OtherSettings):
    def changed(self, request: ImageRequest) -> ImageRequest:
        return replace(request, window=request.window + 1)


class OtherSchedule(OtherSettings):
    """Samples on another schedule."""

    def __init__(self, model: Any, network: torch.nn.Module, **options: Any) -> None:
        super().__init__(model, network, **options)
        walked = copy.copy(model)
        walked.schedule = lambda spec: self.moved(model.schedule(spec))
        self._policy = flow.FlowPolicy(walked, self.transformer)

    def moved(self, schedule: Schedule) -> Schedule:
        raise NotImplementedError


class Shift(OtherSchedule):
    def moved(self, schedule: Schedule) -> Schedule:
        sigmas = 3 * schedule.sigmas / (1 + 2 * schedule.sigmas)
        return Schedule(sigmas, 1000 * sigmas[:-1])


class Bf16Timestep(OtherSchedule):
    def moved(self, schedule: Schedule) -> Schedule:
        return schedule._replace(timesteps=schedule.timesteps.bfloat16().float())


class Bf16Input(DiffusersEngine):
    """Steps start from rounded latents; the recorded latents are not rounded."""

    def __init__(self, model: Any, network: torch.nn.Module, **options: Any) -> None:
        super().__init__(model, network, **options)
        rounding = copy.copy(model)
        rounding.velocity = lambda network, x, *rest: model.velocity(
            network, x.bfloat16().float(), *rest
        )
        self._policy = flow.FlowPolicy(rounding, self.transformer)

    def generate(self, request: ImageRequest) -> Iterator[RolloutChunk]:
        original = flow._transition
        flow._transition = lambda x, *rest, **options: original(
            x.bfloat16().float(), *rest, **options
        )
        try:
            yield from super().generate(request)
        finally:
            flow._transition = original


class Bf16Steps(DiffusersEngine):
    """Rounds latents after every step, and after its log-prob."""

    def generate(self, request: ImageRequest) -> Iterator[RolloutChunk]:
        original = flow.log_prob

        def rounding(step: Any, following: Tensor, **options: Any) -> Tensor:
            value = original(step, following, **options)
            following.copy_(following.bfloat16().float())
            return value

        flow.log_prob = rounding
        try:
            yield from super().generate(request)
        finally:
            flow.log_prob = original


class NoLora(DiffusersEngine):
    def sync_weights(self, state: Mapping[str, Tensor], version: int) -> None:
        off = {
            name: torch.zeros_like(tensor) if "lora_B" in name else tensor
            for name, tensor in state.items()
        }
        super().sync_weights(off, version)


class WeakLora(DiffusersEngine):
    """Leaves out alpha / rank, which is 2 in the tests."""

    def sync_weights(self, state: Mapping[str, Tensor], version: int) -> None:
        super().sync_weights(
            {name: t / 2 if "lora_B" in name else t for name, t in state.items()}, version
        )


class StaleWeights(DiffusersEngine):
    """Takes over the weights of the sync before."""

    waiting: Mapping[str, Tensor] | None = None

    def sync_weights(self, state: Mapping[str, Tensor], version: int) -> None:
        if self.waiting is not None:
            super().sync_weights(self.waiting, version)
        self.waiting = {name: tensor.clone() for name, tensor in state.items()}
        self._replica.version = version


class Bf16Weights(DiffusersEngine):
    """Computes in bf16 and says fp32."""

    def __init__(self, model: Any, network: torch.nn.Module, **options: Any) -> None:
        super().__init__(model, network, **options | {"dtype": "bf16"})
        self._replica.precision = "fp32"


class Autocast(DiffusersEngine):
    """fp32 weights and products in bf16."""

    def generate(self, request: ImageRequest) -> Iterator[RolloutChunk]:
        with torch.autocast("cpu", torch.bfloat16):
            yield from super().generate(request)


class OtherKernels(Autocast):
    """Behaves like a bf16 engine with kernels of its own."""

    def __init__(self, model: Any, network: torch.nn.Module, **options: Any) -> None:
        super().__init__(model, network, **options | {"dtype": "fp32", "chunk_size": 1})
        self._replica.precision = "bf16"


class ShiftOfOtherKernels(OtherKernels, Shift):
    """Has another schedule and other kernels."""


class OneByOne(DiffusersEngine):
    """Samples one image in a forward, so sums have another order."""

    def __init__(self, model: Any, network: torch.nn.Module, **options: Any) -> None:
        super().__init__(model, network, **options | {"chunk_size": 1})
