"""The contract of a rollout engine: it samples, and records what training needs to know.

Shapes: B samples of a request, b samples of a chunk, T stochastic steps, F frames of a video,
H x W pixels.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from flowgrpo_rc.batch import Batch, Prompt, PromptBatch, SamplerSpec, Spec, TokenSpec
from flowgrpo_rc.core.metrics import MetricBag
from flowgrpo_rc.rollout.options.option import RolloutOption

Samples = np.ndarray | Sequence[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutRequest:
    """A request to sample `samples_per_prompt` times from each prompt.

    Rows are prompt-major: all samples of the first prompt come first.
    """

    prompts: PromptBatch
    samples_per_prompt: int
    spec: Spec  # the sampler's settings, which the engine echoes
    seeds: Sequence[int]  # [B]; everything random about a sample follows from its seed
    only: range | None = None  # the rows that are wanted; None for all

    def rows(self) -> range:
        """Returns the rows that are wanted."""
        return range(len(self.seeds)) if self.only is None else self.only

    def chunks(self, size: int) -> list[range]:
        """Returns the rows of each chunk of `size` samples, of those that are wanted."""
        rows = self.rows()
        return [rows[start : start + size] for start in range(0, len(rows), size)]

    def prompt_of(self, row: int) -> Prompt:
        """Returns the prompt of a row."""
        return self.prompts.prompts[row // self.samples_per_prompt]


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageRequest(RolloutRequest):
    """A request for images or videos."""

    spec: SamplerSpec
    window: Tensor  # the steps of the schedule that are stochastic, [B, T] int64
    keep_means: bool = False  # whether the batch has to hold their means (`prev_sample_mean`)
    decode: bool = True  # False if rewards score the latents alone
    noise_seeds: Sequence[int] | None = None  # of the initial noise, where `seeds` do not tell

    @property
    def latent_seeds(self) -> Sequence[int]:
        """Returns the seeds of the initial noise, [B]; with a shared prefix one for each prompt."""
        if self.noise_seeds is not None or not self.spec.shared_prefix:
            return self.noise_seeds or self.seeds
        n = self.samples_per_prompt
        return [self.seeds[row // n * n] for row in range(len(self.seeds))]


@dataclass(frozen=True, kw_only=True, slots=True)
class TextRequest(RolloutRequest):
    """A request for responses of a language model."""

    spec: TokenSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutChunk:
    """Finished samples, in the order of the request."""

    batch: Batch  # their part of it
    # What rewards see: uint8 images [b, H, W, 3] or videos [b, F, H, W, 3], or b texts; None if the
    # request says not to decode.
    samples: Samples | None
    prompts: Sequence[Prompt]  # of each sample
    latents: Tensor | None = None  # the final latents, [b, ...]; None for text
    # Evaluations of blocks that `rollout.cache` has saved, and all with them, each of one row.
    blocks: tuple[int, int] = (0, 0)


R = TypeVar("R", bound=RolloutRequest)


class EngineError(RuntimeError):
    """An engine crashed, hung, or does not sample as the trainer asks, or with its weights."""


class EngineLost(EngineError):
    """The process of an engine has ended, or was silent for too long and was killed."""


class RolloutEngine(ABC, Generic[R]):
    """Samples with its own copy of the weights.

    An engine is constructed with the keywords `model`, `network`, `dtype` and `chunk_size` and with
    the options of `rollout.engine_kwargs`; also with `options`, those of its class that the user
    chose, if any.

    Attributes:
      kind: the `model.kind` that it samples from.
      options: the options of the rollout that it applies.
      records_means: True if it records the means of the steps when a request asks for them.
      finishes_alone: True if a request whose windows are empty gets samples of the ODE, which the
        batch holds: `all_latents` is [B, 1, ...].
      copies_network: False if it loads the frozen weights itself; the trainer may then shard its
        own first.
      takes_images: True if it conditions on the images of prompts.
      draws_seed_noise: True if the noise of a step is `core.random.normal(shape, seeds, "step",
        step)` with the seeds of the request. False says nothing wrong: noise of its own is as good,
        if it is standard normal and independent.
      elsewhere: True if others sample. `generate` then gives them the work at once, and `cancel`
        ends a wait for it in another thread.
      version: the step whose LoRA it samples with.
      pushed: that LoRA, as the trainer gave it; None before the first.
    """

    kind: ClassVar[str]
    options: ClassVar[Sequence[type[RolloutOption]]] = ()
    records_means: ClassVar[bool] = False
    finishes_alone: ClassVar[bool] = False
    copies_network: ClassVar[bool] = True
    elsewhere: ClassVar[bool] = False
    takes_images: ClassVar[bool] = False
    draws_seed_noise: ClassVar[bool] = False
    version: int = 0
    pushed: Mapping[str, Tensor] | None = None

    @classmethod
    def check(
        cls,
        pipeline_class: str,
        absent: Sequence[str],
        device: torch.device,
        options: Mapping[str, Any],
    ) -> None:
        """Raises ValueError, before anything is loaded, for a flow model or options it cannot take.

        An engine that takes all that its constructor's parameters allow need not define it. One
        that lacks a package raises ImportError.

        Args:
          pipeline_class: name of the model's pipeline in diffusers; empty for a language model.
          absent: components of the pipeline that the checkpoint lacks.
          device: the trainer's device.
          options: all that the constructor would get.
        """

    @abstractmethod
    def generate(self, request: R) -> Iterator[RolloutChunk]:
        """Yields chunks as they finish, so that scoring can start early."""

    def sync_weights(self, state: Mapping[str, Tensor], version: int) -> None:
        """Hands the LoRA after `version` steps over. ValueError unless names and shapes match.

        Engines do not override it: `take_weights` brings the tensors where they compute.
        """
        shapes = self.lora_shapes()
        if shapes is not None:
            check_tensors(state, shapes)
        self.version = version
        self.pushed = state
        self.take_weights(state)

    @abstractmethod
    def take_weights(self, state: Mapping[str, Tensor]) -> None:
        """Takes over a LoRA, that of step `self.version`, by the way that this engine has."""

    def lora_shapes(self) -> Mapping[str, torch.Size] | None:
        """Returns the shapes of the LoRA that it takes, by name; None if it does not know them."""
        return None

    @abstractmethod
    def held_weights(self) -> Mapping[str, Tensor] | None:
        """Returns the LoRA that it samples with, by the trainer's names; None if out of reach."""

    def check_weights(self) -> None:
        """Raises EngineError if the engine holds another LoRA than the one pushed last."""
        held = self.held_weights()
        if held is None or self.pushed is None:
            return
        number = other_tensors(held, self.pushed)
        if number:
            raise EngineError(
                f"the rollout engine does not hold the trainer's LoRA of step {self.version}: "
                f"{number} of {len(self.pushed)} tensors are missing or others"
            )

    def plain_layers(self) -> int | None:
        """Returns how many layers `rollout.quantization` left plain; None if nobody can look."""
        return None

    def check_quantization(self, spec: Spec) -> None:
        """Raises EngineError if weights are plain and the settings promise quantized ones."""
        plain = self.plain_layers() if "+" in spec.dtype else None
        if plain:
            raise EngineError(
                f"the rollout engine does not quantize: rollout.dtype and rollout.quantization are "
                f"{spec.dtype}, and {plain} linear layers of its blocks hold plain weights"
            )

    def take_metrics(self) -> MetricBag:
        """Returns metrics of its work since the last call; none as a rule."""
        return MetricBag()

    def cancel(self) -> None:
        """Lets whoever waits for a chunk fail. Nothing is asked of the engine afterwards."""

    @abstractmethod
    def close(self) -> None:
        """Frees what the engine holds."""


def check_settings(requested: Spec, echoed: Spec) -> None:
    """Raises EngineError if an engine has sampled with other settings than it was asked for."""
    different = requested.differences(echoed)
    if different:
        raise EngineError(f"the rollout engine sampled with other settings: {'; '.join(different)}")


def check_tensors(state: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]) -> None:
    """Raises ValueError unless LoRA tensors have the names and shapes of an engine's."""
    pushed = {name: tensor.shape for name, tensor in state.items()}
    # Pairs that only one side has: tensors that lack, that are too many, or of another shape.
    different = sorted({name for name, _ in pushed.items() ^ shapes.items()})[:3]
    if different:
        listed = [f"{name} ({shapes.get(name)}, not {pushed.get(name)})" for name in different]
        raise ValueError(
            "the engine's LoRA has other tensors than the trainer's, among them "
            f"{', '.join(listed)}"
        )


def other_tensors(held: Mapping[str, Tensor], pushed: Mapping[str, Tensor]) -> int:
    """Counts LoRA tensors that only one side has, or that differ by more than rounding."""
    one_sided = held.keys() ^ pushed.keys()
    differ = [
        (tensor != pushed[name].to(tensor)).any() for name, tensor in held.items() if name in pushed
    ]
    return len(one_sided) + (int(torch.stack(differ).sum()) if differ else 0)
