"""What a rollout engine is: it samples and records what training needs to know about the
samples.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from flowgrpo_rc.batch import Batch, Prompt, PromptBatch, SamplerSpec, Spec, TokenSpec

ROLLOUT_DTYPES = ("fp32", "bf16", "fp16", "fp64")
Samples = np.ndarray | Sequence[str]


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
    """window [B, T] int64: the steps of the schedule that are stochastic; keep_means: the batch has
    to hold the means of these steps (`prev_sample_mean`); decode: False where rewards score the
    latents alone."""

    spec: SamplerSpec
    window: Tensor
    keep_means: bool = False
    decode: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class TextRequest(RolloutRequest):
    spec: TokenSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutChunk:
    """Finished samples, in order: their part of the batch, what rewards see (images [b, H, W, 3] or
    videos [b, F, H, W, 3] uint8, or b texts; None where the request says not to decode) and
    prompts; policy_version is that of the last `sync_weights` before they were sampled; latents [b,
    ...]: the final ones, None for text."""

    batch: Batch
    samples: Samples | None
    prompts: Sequence[Prompt]
    policy_version: int
    latents: Tensor | None = None


R = TypeVar("R", bound=RolloutRequest)


class EngineError(RuntimeError):
    """An engine in a process of its own crashed, hung, or does not hold the trainer's weights."""


class RolloutEngine(ABC, Generic[R]):
    """Samples with its own copy of the weights. Constructed with the keywords model, network, dtype
    and chunk_size, and those of `rollout.engine_kwargs`; quantization and compile as well where the
    user sets them.

    kind: the model.kind that it samples from; quantizations: the values of `rollout.quantization`
    that it offers, each with the package that it takes; compiles: whether `rollout.compile` means
    something to it; copies_network: false if it loads the frozen weights itself, so that the
    trainer's may be sharded before; aligns: whether each chunk of `chunk_size` samples is one batch
    of its network, in the trainer's own code (`actor.replay=aligned`).
    """

    kind: ClassVar[str]
    quantizations: ClassVar[Mapping[str, str]] = {}
    compiles: ClassVar[bool] = False
    copies_network: ClassVar[bool] = True
    aligns: ClassVar[bool] = False

    @classmethod
    def check(
        cls,
        pipeline_class: str,
        absent: Sequence[str],
        device: torch.device,
        options: Mapping[str, Any],
    ) -> None:
        """ValueError, before anything is loaded, for a flow model or options that the engine cannot
        take; ImportError where its package is missing.

        pipeline_class: empty for a language model; absent: components of the pipeline that the
        checkpoint lacks; options: all that the constructor would get. An engine that takes whatever its constructor's names allow need not
        define it.
        """

    @abstractmethod
    def generate(self, request: R) -> Iterator[RolloutChunk]:
        """Yield chunks as they finish, so that rewards can start; their batches can be joined by
        `concat`.
        """

    @abstractmethod
    def sync_weights(self, state: Mapping[str, Tensor], version: int) -> None:
        """Take over the LoRA tensors of the trainer. ValueError if names or shapes do not match
        exactly.
        """

    @abstractmethod
    def held_weights(self) -> Mapping[str, Tensor] | None:
        """The LoRA tensors that it samples with, in its precision, named as the trainer's; None
        where it compares them in `sync_weights`, out of the trainer's reach."""

    @abstractmethod
    def close(self) -> None:
        """Free what the engine holds."""
