"""What a rollout engine is: it samples and records what training needs to know about the samples."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
from torch import Tensor

from flowgrpo_rc.batch import Batch, Prompt, PromptBatch, SamplerSpec, Spec, TokenSpec
from flowgrpo_rc.core.schedule import SHARING, window_bounds
from flowgrpo_rc.core.transition import CONVENTIONS, KINDS

ROLLOUT_DTYPES = ("fp32", "bf16", "fp16")
Samples = np.ndarray | Sequence[str]


@dataclass(kw_only=True)
class PipelineConfig:
    """Image size in pixels, denoising steps and guidance of the rollout, in the pipeline's own words.

    guidance_scale: 1 is no guidance. max_sequence_length: tokens of the T5 prompt.
    """

    height: int = 512
    width: int = 512
    num_inference_steps: int = 10
    guidance_scale: float = 4.5
    max_sequence_length: int = 128


@dataclass(kw_only=True)
class AlgoConfig:
    """The stochastic part. sde_type: sde, cps or dance_sde; log_prob_convention: gaussian, or `peers` for cps;
    sde_window_size steps (null: the whole range) drawn from sde_window_range [first, last) (null: all but the last
    step); window_sharing: who has the same window, batch, group or sample."""

    noise_level: float = 0.7
    sde_type: str = "sde"
    log_prob_convention: str = "gaussian"
    sde_window_size: int | None = None
    sde_window_range: list[int] | None = None
    window_sharing: str = "group"


@dataclass(kw_only=True)
class EvaluationConfig:
    """How held-out samples are made, with a fixed seed: images by the ODE, with their own steps and guidance; text at
    its own temperature (0: the likeliest token).

    n prompts of the file are used (null: all), in batches of `batch_size`.
    """

    num_inference_steps: int = 40
    guidance_scale: float = 4.5
    temperature: float = 0.0
    n: int | None = None
    batch_size: int = 16
    seed: int = 42


@dataclass(kw_only=True)
class RolloutConfig:
    """name: the engine (a module of this folder); n: samples per prompt; dtype: precision of the sampling weights;
    micro_batch_size_per_gpu: samples per forward (null: as the actor's, which keeps the replay aligned);
    engine_kwargs: further options of the engine.

    For images: pipeline and algo. For text: temperature, and prompt_length and response_length in tokens; a longer
    prompt is an error.
    """

    name: str = "diffusers_engine"
    n: int = 24
    dtype: str = "bf16"
    micro_batch_size_per_gpu: int | None = None
    calculate_log_probs: bool = True
    temperature: float = 1.0
    prompt_length: int = 512
    response_length: int = 512
    engine_kwargs: dict[str, Any] = field(default_factory=dict)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    val_kwargs: EvaluationConfig = field(default_factory=EvaluationConfig)

    def spec(self) -> SamplerSpec:
        """The sampler that training rollouts use."""
        return SamplerSpec(
            height=self.pipeline.height,
            width=self.pipeline.width,
            num_inference_steps=self.pipeline.num_inference_steps,
            guidance_scale=self.pipeline.guidance_scale,
            noise_level=self.algo.noise_level,
            sde_type=self.algo.sde_type,
            log_prob_convention=self.algo.log_prob_convention,
            max_sequence_length=self.pipeline.max_sequence_length,
            dtype=self.dtype,
        )

    def token_spec(self) -> TokenSpec:
        """How training rollouts sample text."""
        return TokenSpec(
            dtype=self.dtype,
            temperature=self.temperature,
            prompt_length=self.prompt_length,
            response_length=self.response_length,
        )

    def window(self) -> tuple[int, int, int]:
        """(size, first, last) of the SDE window; ValueError where it does not fit the schedule."""
        algo, steps = self.algo, self.pipeline.num_inference_steps
        return window_bounds(steps, algo.sde_window_size, algo.sde_window_range, algo.sde_type)

    def validate(self) -> None:
        """Raise ValueError for a setting that is out of range, naming key, value and what is allowed."""
        _one_of("rollout.dtype", self.dtype, ROLLOUT_DTYPES)
        if not 0 < self.temperature < math.inf or not 0 <= self.val_kwargs.temperature < math.inf:
            raise ValueError(
                f"rollout.temperature={self.temperature}, rollout.val_kwargs.temperature="
                f"{self.val_kwargs.temperature}: give a number above 0; held-out text may take 0, the likeliest token"
            )
        if self.prompt_length < 1 or self.response_length < 1:
            raise ValueError(
                f"rollout.prompt_length={self.prompt_length}, rollout.response_length={self.response_length}: give at "
                "least 1 token"
            )
        _one_of("rollout.algo.sde_type", self.algo.sde_type, KINDS)
        _one_of("rollout.algo.log_prob_convention", self.algo.log_prob_convention, CONVENTIONS)
        _one_of("rollout.algo.window_sharing", self.algo.window_sharing, SHARING)
        if self.algo.log_prob_convention == "peers" and self.algo.sde_type != "cps":
            raise ValueError("rollout.algo.log_prob_convention=peers exists for rollout.algo.sde_type=cps only")
        if self.n < 2:
            raise ValueError(f"rollout.n={self.n}: a group needs at least 2 samples to compare")
        upper = 1.0 if self.algo.sde_type == "cps" else float("inf")
        if not 0 < self.algo.noise_level <= upper:
            raise ValueError(
                f"rollout.algo.noise_level={self.algo.noise_level}: give a number above 0"
                + (" and at most 1 for cps" if upper == 1 else "")
            )
        if self.val_kwargs.batch_size < 1 or (self.val_kwargs.n is not None and self.val_kwargs.n < 1):
            raise ValueError(
                f"rollout.val_kwargs.batch_size={self.val_kwargs.batch_size} and rollout.val_kwargs.n="
                f"{self.val_kwargs.n}: give at least 1 (n: or null for all prompts)"
            )
        for key, pipeline in (("pipeline", self.pipeline), ("val_kwargs", self.val_kwargs)):
            if pipeline.num_inference_steps < 1:
                raise ValueError(f"rollout.{key}.num_inference_steps={pipeline.num_inference_steps}: give at least 1")
            if pipeline.guidance_scale < 1:
                raise ValueError(f"rollout.{key}.guidance_scale={pipeline.guidance_scale}: give 1 (none) or more")
        if self.pipeline.num_inference_steps < 2:
            raise ValueError("rollout.pipeline.num_inference_steps=1 leaves no stochastic step: give at least 2")
        if not 0 <= self.pipeline.max_sequence_length <= 512:
            raise ValueError(f"rollout.pipeline.max_sequence_length={self.pipeline.max_sequence_length}: give 0 to 512")
        if not self.calculate_log_probs:
            raise ValueError(
                "rollout.calculate_log_probs=false leaves nothing to correct with, in bypass mode not even an old "
                "policy: set it to true"
            )
        self.window()


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutRequest:
    """Sample `samples_per_prompt` times from each prompt; rows are prompt-major.

    seeds [B]: everything random about a sample follows from its seed.
    """

    prompts: PromptBatch
    samples_per_prompt: int
    spec: Spec
    seeds: Sequence[int]

    def prompt_of(self, row: int) -> Prompt:
        return self.prompts.prompts[row // self.samples_per_prompt]


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageRequest(RolloutRequest):
    """window [B, T] int64: the steps of the schedule that are stochastic; keep_means: the batch has to hold the means
    of these steps (`prev_sample_mean`)."""

    spec: SamplerSpec
    window: Tensor
    keep_means: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class TextRequest(RolloutRequest):
    spec: TokenSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutChunk:
    """Finished samples, in order: their part of the batch, what rewards see (images [b, H, W, 3] uint8 or b texts) and
    prompts; policy_version is that of the last `sync_weights` before they were sampled."""

    batch: Batch
    samples: Samples
    prompts: Sequence[Prompt]
    policy_version: int


R = TypeVar("R", bound=RolloutRequest)


class RolloutEngine(ABC, Generic[R]):
    """Samples with its own copy of the weights. Constructed with the keywords model, network, dtype and chunk_size,
    and those of `rollout.engine_kwargs`. `kind` is the model.kind that it samples from."""

    kind: ClassVar[str]

    @abstractmethod
    def generate(self, request: R) -> Iterator[RolloutChunk]:
        """Yield chunks as they finish, so that rewards can start; their batches can be joined by `concat`."""

    @abstractmethod
    def sync_weights(self, state: Mapping[str, Tensor], version: int) -> None:
        """Take over the LoRA tensors of the trainer. ValueError if names or shapes do not match exactly."""

    @abstractmethod
    def close(self) -> None:
        """Free what the engine holds."""


def _one_of(key: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ValueError(f"{key}={value!r}: allowed are {', '.join(allowed)}")
