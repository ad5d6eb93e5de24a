"""What differs between training an image model and a language model; the loop knows none of it."""

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
    """What differs between training an image model and a language model."""

    model: TrainableModel
    policy: Policy[Any]

    @abstractmethod
    def request(self, prompts: PromptBatch, seeds: Sequence[int]) -> RolloutRequest:
        """Asks for `rollout.n` samples of each of P prompts, prompt-major, by their P * n seeds."""

    @abstractmethod
    def origin(self) -> dict[str, object]:
        """Returns, for JSON, what a saved rollout must share with a run that trains on it."""

    @abstractmethod
    def check_rollout(self, batch: Any) -> None:
        """Raises ValueError unless a chunk of a rollout holds what training needs."""

    @abstractmethod
    def observe(self, batch: Any, shown: Shown, step: int) -> MetricBag:
        """Measures facts about the rollout of a step; `shown` is empty for samples from files."""

    @abstractmethod
    def sample(
        self, prompts: Sequence[Prompt], seeds: Sequence[int], *, decode: bool = True
    ) -> HeldOut:
        """Draws one held-out sample for each prompt; its seed alone decides its randomness."""

    @abstractmethod
    def save_samples(
        self,
        stem: Path,
        samples: Sequence[Any],
        prompts: Sequence[Prompt],
        scores: Sequence[float],
    ) -> Image.Image | None:
        """Writes held-out samples to `stem` plus an ending; returns a picture of them, or None."""
