"""What differs between training an image model and a language model. The loop is one and knows none
of this.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from flowgrpo_rc.batch import Prompt, PromptBatch
from flowgrpo_rc.core.metrics import MetricBag
from flowgrpo_rc.evaluation.held_out import HeldOut
from flowgrpo_rc.models.base import TrainableModel
from flowgrpo_rc.policies.base import Policy
from flowgrpo_rc.records.samples import Shown
from flowgrpo_rc.rollout.engine import RolloutRequest


class Task(ABC):
    """What differs between training an image model and a language model.

    Attributes:
      model: what is trained, with its LoRA on.
      policy: the trainer's own view of it.
    """

    model: TrainableModel
    policy: Policy[Any]

    @abstractmethod
    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Raises ValueError for a prompt that the model cannot take."""

    @abstractmethod
    def request(self, prompts: PromptBatch, seeds: Sequence[int]) -> RolloutRequest:
        """Returns what the engine is asked for: `rollout.n` samples of each prompt, prompt-major.

        Args:
          prompts: this process's share of a step, [P].
          seeds: the seed of each sample, [P * n].
        """

    @abstractmethod
    def origin(self) -> dict[str, Any]:
        """Returns what a saved rollout must share with a run that trains on it, beside the spec.

        JSON can hold it.
        """

    @abstractmethod
    def check_rollout(self, batch: Any) -> None:
        """Raises ValueError unless a chunk of a rollout holds what training needs."""

    @abstractmethod
    def observe(self, batch: Any, shown: Shown, step: int) -> MetricBag:
        """Measures facts about a rollout, such as the length of responses; full names.

        Args:
          batch: the samples, [B].
          shown: what is kept of their prompts and pictures; empty for samples from files.
          step: the step that they are for; the first is 1.
        """

    @abstractmethod
    def sample(
        self, prompts: Sequence[Prompt], seeds: Sequence[int], *, decode: bool = True
    ) -> HeldOut:
        """Draws one held-out sample for each prompt.

        Args:
          prompts: the prompts, [N].
          seeds: the seed of each sample, [N], which alone decides its randomness.
          decode: False if the latents of images are enough.
        """

    @abstractmethod
    def save_samples(
        self, stem: Path, samples: Sequence[Any], prompts: Sequence[Prompt], scores: Sequence[float]
    ) -> Image.Image | None:
        """Writes held-out samples to `stem` plus an ending; returns a picture of them, or None."""
