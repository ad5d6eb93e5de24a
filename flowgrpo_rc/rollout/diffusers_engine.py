"""Rollouts in the trainer's process through diffusers, in a precision of their own."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from flowgrpo_rc.batch import Conditioning, DiffusionBatch
from flowgrpo_rc.core.random import normal
from flowgrpo_rc.models.base import DTYPES, FlowModel
from flowgrpo_rc.policies.flow import FlowPolicy
from flowgrpo_rc.rollout.base import RolloutChunk, RolloutEngine, RolloutRequest


class DiffusersEngine(RolloutEngine):
    """Holds a copy of the LoRA-wrapped transformer in `dtype`; everything else belongs to the shared model.

    In the training weights' own precision the copy shares their frozen tensors. The LoRA is always a copy and stays
    separate: merged into bf16 weights, small updates would be rounded away.
    """

    def __init__(self, model: FlowModel, transformer: torch.nn.Module, *, dtype: str, chunk_size: int) -> None:
        frozen = _frozen(transformer)
        if all(tensor.dtype == DTYPES[dtype] for tensor in frozen):
            replica = copy.deepcopy(transformer, memo={id(tensor): tensor for tensor in frozen})
        else:
            replica = copy.deepcopy(transformer).to(DTYPES[dtype])
        self._lora = {name: p for name, p in replica.named_parameters() if p.requires_grad}
        replica.requires_grad_(False).eval()
        self.transformer = replica
        self._policy = FlowPolicy(model, replica)
        self._model = model
        self._chunk_size = chunk_size
        self._dtype = dtype
        self._version = 0

    def generate(self, request: RolloutRequest) -> Iterator[RolloutChunk]:
        spec, prompts = request.spec, request.prompts.prompts
        conditioning = encode_unique(self._model, [p.text for p in prompts], spec.max_sequence_length)
        negative = None
        if spec.guidance_scale > 1:
            negative = encode_unique(self._model, [p.negative_text for p in prompts], spec.max_sequence_length)
        for start in range(0, len(request.seeds), self._chunk_size):
            yield self._chunk(request, conditioning, negative, start)

    def sync_weights(self, state: Mapping[str, Tensor], version: int) -> None:
        if state.keys() != self._lora.keys():
            different = sorted(state.keys() ^ self._lora.keys())[:3]
            raise ValueError(f"the engine's LoRA has other tensors than the trainer's, among them {different}")
        for name, parameter in self._lora.items():
            parameter.copy_(state[name])
        self._version = version

    def close(self) -> None:
        self._lora = {}
        del self.transformer, self._policy

    def _chunk(
        self, request: RolloutRequest, conditioning: Conditioning, negative: Conditioning | None, start: int
    ) -> RolloutChunk:
        spec, device = request.spec, self._model.device
        seeds = request.seeds[start : start + self._chunk_size]
        rows = range(start, start + len(seeds))
        prompt_index = torch.tensor([row // request.samples_per_prompt for row in rows], device=device)
        window = request.window[start : start + len(seeds)].to(device)
        shape = self._model.latent_shape(spec.height, spec.width)
        trajectory = self._policy.rollout(
            normal(shape, seeds, "latents").to(device),
            conditioning[prompt_index],
            None if negative is None else negative[prompt_index],
            spec,
            window,
            lambda step: normal(shape, seeds, "step", step).to(device),
        )
        schedule = trajectory.schedule
        slots = torch.tensor(request.prompts.slots, device=device)
        batch = DiffusionBatch(
            spec=replace(spec, dtype=self._dtype),
            all_latents=trajectory.window_latents,
            all_timesteps=schedule.timesteps[window],
            step_indices=window,
            sigmas=schedule.sigmas,
            rollout_log_probs=trajectory.log_probs,
            conditioning=conditioning,
            negative=negative,
            prompt_index=prompt_index,
            group=slots[prompt_index],
            seed=torch.tensor(seeds, device=device),
            policy_version=torch.full_like(prompt_index, self._version),
        )
        images = self._model.decode(trajectory.final)
        prompts = [request.prompt_of(row) for row in rows]
        return RolloutChunk(batch=batch, images=images, prompts=prompts, policy_version=self._version)


def encode_unique(model: FlowModel, texts: list[str], max_sequence_length: int) -> Conditioning:
    """Conditioning of every text [len(texts), ...], each distinct one encoded once."""
    unique = list(dict.fromkeys(texts))
    rows = torch.tensor([unique.index(text) for text in texts], device=model.device)
    return model.encode(unique, max_sequence_length=max_sequence_length)[rows]


def _frozen(module: torch.nn.Module) -> list[Tensor]:
    """Frozen parameters and floating-point buffers."""
    parameters = [p for p in module.parameters() if not p.requires_grad]
    return parameters + [b for b in module.buffers() if b.is_floating_point()]
