"""Rollouts of images in the trainer's process, through diffusers, in a precision of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from flowgrpo_rc.batch import Conditioning, PromptBatch, SamplerSpec
from flowgrpo_rc.core.random import normal
from flowgrpo_rc.models.base import FlowModel
from flowgrpo_rc.policies.encode_prompts import encode_prompts
from flowgrpo_rc.policies.flow import FlowPolicy, SdeWindow
from flowgrpo_rc.rollout.engine import ImageRequest, RolloutChunk
from flowgrpo_rc.rollout.image_chunk import SampledImages, image_chunk
from flowgrpo_rc.rollout.options.cached_blocks import CachedBlocks
from flowgrpo_rc.rollout.options.compiled import Compiled
from flowgrpo_rc.rollout.options.option import RolloutOption
from flowgrpo_rc.rollout.replica import Replica, ReplicaEngine


class DiffusersEngine(ReplicaEngine[ImageRequest]):
    """Samples with a copy of the LoRA-wrapped transformer, and the trainer's encoders and VAE."""

    kind = "diffusion"
    options = (*ReplicaEngine.options, Compiled, CachedBlocks)
    records_means = True
    finishes_alone = True
    takes_images = True
    draws_seed_noise = True

    def __init__(
        self,
        model: FlowModel,
        network: torch.nn.Module,
        *,
        dtype: str,
        chunk_size: int,
        options: Sequence[RolloutOption] = (),
    ) -> None:
        self._replica = Replica(network, dtype, options)
        self.transformer = self._replica.network
        self._policy = FlowPolicy(model, self.transformer, cache=self._replica.cache)
        self._model = model
        self._chunk_size = chunk_size
        self._encoded_request: tuple[PromptBatch, SamplerSpec] | None = None
        self._encoded: tuple[Conditioning, Conditioning | None]

    def generate(self, request: ImageRequest) -> Iterator[RolloutChunk]:
        """Yields chunks of `chunk_size` samples, decoded unless the request says otherwise."""
        model = self._model
        spec = request.spec
        shape = model.latent_shape(spec)
        conditioning, negative = self._encode(request)
        cache = self._replica.cache
        cached_steps = () if cache is None else spec.cached_steps
        for rows in request.chunks(self._chunk_size):
            seeds = request.seeds[rows.start : rows.stop]
            latent_seeds = request.latent_seeds[rows.start : rows.stop]
            prompt_index = torch.tensor(
                [row // request.samples_per_prompt for row in rows], device=model.device
            )
            trajectory = self._policy.rollout(
                normal(shape, latent_seeds, "latents").to(model.device),
                conditioning[prompt_index],
                None if negative is None else negative[prompt_index],
                spec,
                SdeWindow(
                    request.window[rows.start : rows.stop].to(model.device),
                    # It follows from seed and step alone, so that chunks and workers do not matter.
                    partial(normal, shape, seeds, "step"),
                    request.keep_means,
                ),
                group=prompt_index,
            )
            sampled = SampledImages(
                trajectory=trajectory,
                conditioning=conditioning,
                negative=negative,
                spec=replace(self._replica.spec(spec), cached_steps=cached_steps),
                version=self.version,
                blocks=(cache.skipped, cache.evaluations) if cache else (0, 0),
            )
            yield image_chunk(model, request, rows, sampled)

    def _encode(self, request: ImageRequest) -> tuple[Conditioning, Conditioning | None]:
        """Encodes the prompts once for all requests of a step, which may be one for each chunk."""
        key = request.prompts, request.spec
        if key != self._encoded_request:
            self._encoded = encode_prompts(self._model, request.prompts.prompts, request.spec)
            self._encoded_request = key
        return self._encoded
