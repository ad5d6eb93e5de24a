"""What differs between training an image model and a language model. The loop is one and knows none
of this.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image
from torch import Tensor

from flowgrpo_rc.batch import Prompt, PromptBatch
from flowgrpo_rc.core.metrics import MetricBag
from flowgrpo_rc.losses.config import LossConfig
from flowgrpo_rc.losses.policy import Objective
from flowgrpo_rc.models.base import TrainableModel
from flowgrpo_rc.policies.base import Policy
from flowgrpo_rc.rollout.engine import RolloutRequest


class HeldOut(NamedTuple):
    """Samples, None where they were not decoded, and the latents of images [N, ...]."""

    samples: Any
    latents: Tensor | None = None

    def first(self, count: int) -> HeldOut:
        return HeldOut(*(None if column is None else column[:count] for column in self))


class Task(ABC):
    """model: what is trained, with its LoRA on; policy: the trainer's own view of it."""

    model: TrainableModel
    policy: Policy[Any, Any]

    @abstractmethod
    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        """ValueError, before anything is sampled, for a prompt that the model cannot take."""

    @abstractmethod
    def request(self, prompts: PromptBatch, seeds: Sequence[int]) -> RolloutRequest:
        """What the engine is asked for: rollout.n samples of each prompt, prompt-major, one seed
        each.
        """

    @abstractmethod
    def origin(self) -> dict[str, Any]:
        """What a saved rollout must have in common with the run that trains on it, besides the
        spec; JSON-able.
        """

    @abstractmethod
    def check_rollout(self, batch: Any) -> None:
        """ValueError unless a finished part of a rollout holds what training needs of it."""

    @abstractmethod
    def objective(self, config: LossConfig) -> Objective:
        """Builds the loss of this kind of model, once for a run."""

    @abstractmethod
    def observe(self, batch: Any) -> MetricBag:
        """Facts about a rollout that are worth a curve, such as the length of responses; full
        names.
        """

    @abstractmethod
    def sample(self, prompts: Sequence[Prompt], *, decode: bool = True) -> HeldOut:
        """One held-out sample for each prompt, whose randomness follows from the prompt's index
        alone.

        decode: False where the latents of images are enough.
        """

    @abstractmethod
    def save_samples(
        self, stem: Path, samples: Sequence[Any], prompts: Sequence[Prompt], scores: Sequence[float]
    ) -> Image.Image | None:
        """Write held-out samples to `stem` plus an ending; returns a picture of them where there is
        one.
        """
