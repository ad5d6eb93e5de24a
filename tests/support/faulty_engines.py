"""Engines with one fault each, of diffusers but for the last.

The fault is hidden: the record says what an engine without a fault would record. A run names them
by path, `rollout.name=support.faulty_engines.StaleWeights`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.core.random import normal, uniform
from flowgrpo_rc.models.base import Schedule
from flowgrpo_rc.models.quantization import precision
from flowgrpo_rc.policies import flow
from flowgrpo_rc.policies.encode_prompts import encode_prompts
from flowgrpo_rc.rollout import diffusers_engine
from flowgrpo_rc.rollout.diffusers_engine import DiffusersEngine
from flowgrpo_rc.rollout.engine import ImageRequest, RolloutChunk
from flowgrpo_rc.rollout.options.quantized import Quantized
from flowgrpo_rc.rollout.transformers_engine import TransformersEngine


class Recorded(DiffusersEngine):
    def generate(self, request: ImageRequest) -> Iterator[RolloutChunk]:
        for chunk in super().generate(request):
            yield replace(chunk, batch=self.record(chunk.batch))

    def record(self, batch: Any) -> Any:
        raise NotImplementedError


class Bf16Latents(Recorded):
    def record(self, batch: Any) -> Any:
        return batch.replace(all_latents=batch.all_latents.bfloat16().float())


class LateLogProbs(Recorded):
    def record(self, batch: Any) -> Any:
        return batch.replace(rollout_log_probs=batch.rollout_log_probs.roll(-1, 1))


class NanLogProbs(Recorded):
    def record(self, batch: Any) -> Any:
        log_probs = batch.rollout_log_probs.clone()
        log_probs[:, 1] = float("nan")
        return batch.replace(rollout_log_probs=log_probs)


class NoMeans(DiffusersEngine):
    records_means = False


class OtherSettings(DiffusersEngine):
    """Samples with changed settings, and records the ones asked for."""

    def generate(self, request: ImageRequest) -> Iterator[RolloutChunk]:
        honest = self._model.walked_schedule(request.spec)
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
    def changed(self, request: ImageRequest) -> ImageRequest:
        return replace(
            request, spec=replace(request.spec, guidance_scale=1.01 * request.spec.guidance_scale)
        )


class NoNegative(OtherSettings):
    """Drops the guidance, and with it the record of the negative prompts."""

    def changed(self, request: ImageRequest) -> ImageRequest:
        return replace(request, spec=replace(request.spec, guidance_scale=1.0))


class NoGuidance(NoNegative):
    def generate(self, request: ImageRequest) -> Iterator[RolloutChunk]:
        _, negative = encode_prompts(self._model, request.prompts.prompts, request.spec)
        for chunk in super().generate(request):
            batch: Any = chunk.batch
            yield replace(chunk, batch=batch.replace(negative=negative))


class LateWindow(OtherSettings):
    def changed(self, request: ImageRequest) -> ImageRequest:
        return replace(request, window=request.window + 1)


class OtherSchedule(OtherSettings):
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


class NoShift(OtherSchedule):
    def __init__(self, model: Any, network: torch.nn.Module, **options: Any) -> None:
        super().__init__(model, network, **options)
        scheduler = type(model.scheduler).from_config(
            model.scheduler.config, shift=1.0, use_dynamic_shifting=False
        )
        steps = {}

        def schedule(spec: Any) -> Schedule:
            if spec.num_inference_steps not in steps:
                scheduler.set_timesteps(spec.num_inference_steps)
                found = Schedule(scheduler.sigmas.clone(), scheduler.timesteps.clone())
                steps[spec.num_inference_steps] = found
            return steps[spec.num_inference_steps]

        self._policy.model.schedule = schedule


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
        transition = flow.step_transition

        def rounding(x: Tensor, *rest: Any, **options: Any) -> Any:
            return transition(x.bfloat16().float(), *rest, **options)

        with mock.patch.object(flow, "step_transition", rounding):
            yield from super().generate(request)


class Bf16Steps(DiffusersEngine):
    """Rounds latents after every step, and after its log-prob."""

    def generate(self, request: ImageRequest) -> Iterator[RolloutChunk]:
        log_prob = flow.log_prob

        def rounding(step: Any, following: Tensor, **options: Any) -> Tensor:
            value = log_prob(step, following, **options)
            following.copy_(following.bfloat16().float())
            return value

        with mock.patch.object(flow, "log_prob", rounding):
            yield from super().generate(request)


class NoLora(DiffusersEngine):
    def take_weights(self, state: Mapping[str, Tensor]) -> None:
        off = {
            name: torch.zeros_like(tensor) if "lora_B" in name else tensor
            for name, tensor in state.items()
        }
        super().take_weights(off)


class UnboundLora(DiffusersEngine):
    """Takes the LoRA under other names, and leaves out without a word what it does not know."""

    def __init__(self, model: Any, network: torch.nn.Module, **options: Any) -> None:
        super().__init__(model, network, **options)
        for name, tensor in self._replica.lora.items():
            if ".lora_B." in name:
                tensor.data.zero_()

    def take_weights(self, state: Mapping[str, Tensor]) -> None:
        named = {self.renamed(name): tensor for name, tensor in state.items()}
        known = {name: tensor for name, tensor in named.items() if name in self._replica.lora}
        self._bound = list(known)
        super().take_weights(dict(self._replica.lora) | known)

    def renamed(self, name: str) -> str:
        return f"base_model.model.{name}"

    def held_weights(self) -> Mapping[str, Tensor]:
        return {name: self._replica.lora[name] for name in self._bound}


class HalfLora(UnboundLora):
    """Knows the projections of the image alone."""

    def renamed(self, name: str) -> str:
        return name.replace("add_", "added_")


class WeakLora(DiffusersEngine):
    """Leaves out alpha / rank, which is 2 in the tests."""

    def take_weights(self, state: Mapping[str, Tensor]) -> None:
        super().take_weights({n: t / 2 if "lora_B" in n else t for n, t in state.items()})


class StaleWeights(DiffusersEngine):
    """Takes over the weights of the sync before."""

    waiting: Mapping[str, Tensor] | None = None

    def take_weights(self, state: Mapping[str, Tensor]) -> None:
        if self.waiting is not None:
            super().take_weights(self.waiting)
        self.waiting = {name: tensor.clone() for name, tensor in state.items()}


class OwnOptions(DiffusersEngine):
    """Has options of its own, whatever it is given, and says another precision than it has."""

    own: Mapping[str, Any]
    said: str | None = None

    def __init__(self, model: Any, network: torch.nn.Module, **options: Any) -> None:
        super().__init__(model, network, **options | self.own)
        self._replica.precision = self.said or self._replica.precision


class OneByOne(OwnOptions):
    """Samples one image in a forward, so sums have another order, which is no fault."""

    own: Mapping[str, Any] = {"chunk_size": 1}


class Bf16Weights(OwnOptions):
    own: Mapping[str, Any] = {"dtype": "bf16"}
    said = "fp32"


class Autocast(DiffusersEngine):
    """fp32 weights and products in bf16."""

    def generate(self, request: ImageRequest) -> Iterator[RolloutChunk]:
        with torch.autocast("cpu", torch.bfloat16):
            yield from super().generate(request)


class OtherKernels(Autocast, OwnOptions):
    """Behaves like a bf16 engine with kernels of its own."""

    own: Mapping[str, Any] = {"dtype": "fp32", "chunk_size": 1}
    said = "bf16"


# --- Noise


class OtherNoise(DiffusersEngine):
    """Draws other noise for its steps; the initial latents are those of the seeds."""

    def generate(self, request: ImageRequest) -> Iterator[RolloutChunk]:
        self.request = request

        def drawn(shape: Sequence[int], seeds: Sequence[int], *purpose: Any) -> Tensor:
            if purpose[0] == "latents":
                return normal(shape, seeds, *purpose)
            return self.noise(shape, seeds, purpose[1])

        with mock.patch.object(diffusers_engine, "normal", drawn):
            yield from super().generate(request)

    def noise(self, shape: Sequence[int], seeds: Sequence[int], step: int) -> Tensor:
        raise NotImplementedError


class SharedNoise(OtherNoise):
    def noise(self, shape: Sequence[int], seeds: Sequence[int], step: int) -> Tensor:
        every = self.request.samples_per_prompt
        rows = [self.request.seeds.index(seed) for seed in seeds]
        first = [self.request.seeds[row - row % every] for row in rows]
        return normal(shape, first, "step", step)


class SameNoise(OtherNoise):
    def noise(self, shape: Sequence[int], seeds: Sequence[int], step: int) -> Tensor:
        return normal(shape, seeds, "step", 0)


class NeighboursNoise(OtherNoise):
    """Seeds of steps count on from the sample's: two samples meet at different steps."""

    def noise(self, shape: Sequence[int], seeds: Sequence[int], step: int) -> Tensor:
        rows = [self.request.seeds.index(seed) for seed in seeds]
        return normal(shape, [row + step for row in rows], "step")


class LoudNoise(OtherNoise):
    def noise(self, shape: Sequence[int], seeds: Sequence[int], step: int) -> Tensor:
        return 1.1 * normal(shape, seeds, "step", step)


class UniformNoise(OtherNoise):
    """Has variance 1 and is not normal."""

    draws_seed_noise = False

    def noise(self, shape: Sequence[int], seeds: Sequence[int], step: int) -> Tensor:
        return (uniform(shape, seeds, "step", step).float() - 0.5) * 12**0.5


class OwnNoise(OtherNoise):
    """Follows seeds of its own, which is no fault."""

    draws_seed_noise = False

    def noise(self, shape: Sequence[int], seeds: Sequence[int], step: int) -> Tensor:
        return normal(shape, seeds, "own", step)


class NotTheSeeds(OwnNoise):
    """Says that it follows the seeds of the request."""

    draws_seed_noise = True


# --- Prompts


class Collapsed(DiffusersEngine):
    """Samples from texts whose whitespace is collapsed, and records what the given texts encode."""

    def generate(self, request: ImageRequest) -> Iterator[RolloutChunk]:
        prompts = request.prompts
        changed = replace(prompts, prompts=[self.reached(prompt) for prompt in prompts.prompts])
        conditioning, negative = encode_prompts(self._model, prompts.prompts, request.spec)
        start = 0
        for chunk in super().generate(replace(request, prompts=changed)):
            rows = range(start, start + len(chunk.batch))
            start += len(chunk.batch)
            batch: Any = chunk.batch
            if not self.tells:
                batch = batch.replace(conditioning=conditioning, negative=negative)
            yield replace(chunk, batch=batch, prompts=[request.prompt_of(row) for row in rows])

    tells = False

    def reached(self, prompt: Prompt) -> Prompt:
        return replace(prompt, text=" ".join(prompt.text.split()))


class TellsCollapsed(Collapsed):
    tells = True


# --- Quantization


class PlainWeights(DiffusersEngine):
    """Says that its weights are quantized, and loads plain ones."""

    def __init__(
        self,
        model: Any,
        network: torch.nn.Module,
        *,
        options: Sequence[Quantized] = (),
        **keywords: Any,
    ) -> None:
        super().__init__(model, network, **keywords)
        (quantized,) = options
        self._replica.precision = precision(keywords["dtype"], quantized.name)


class HiddenPlainWeights(PlainWeights):
    """Its weights are out of the trainer's reach, as in a process of its own."""

    def plain_layers(self) -> None:  # type: ignore[override]
        return None


class CoarseTextWeights(TransformersEngine):
    """Samples text with weights of three bits after the point."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        for name, weight in self._replica.network.named_parameters():
            if "lora" not in name:
                weight.data.copy_(weight.data.to(torch.float8_e4m3fn))
