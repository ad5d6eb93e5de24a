"""How well an OCR model reads the target text in a video: the mean over its frames."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.rewards.base import Reward, Scores
from flowgrpo_rc.rewards.ocr import OCR


class VideoOCR(Reward):
    """The mean score of every `every`-th frame [N, F, H, W, 3], by the `ocr` reward with its options.

    Flow-GRPO's video reward leaves out frames that score 0; here they count, so that text has to stay.
    Raises ValueError for a number below 1, and as `ocr` does.
    """

    kind: ClassVar[str] = "video"
    part_names: ClassVar[tuple[str, ...]] = OCR.part_names
    requires_target: ClassVar[bool] = True

    def __init__(self, *, every: int = 8, detection: str = "auto", threads: int = 1, batch_size: int = 1) -> None:
        if every < 1:
            raise ValueError(f"every={every!r} must be at least 1")
        self.every = every
        self._images = OCR(detection=detection, threads=threads, batch_size=batch_size)

    def __call__(self, samples: np.ndarray, prompts: Sequence[Prompt]) -> Scores:
        frames = samples[:, :: self.every]
        count = frames.shape[1]
        scores = self._images(frames.reshape(-1, *frames.shape[2:]), [p for p in prompts for _ in range(count)])

        def mean(values: Sequence[float]) -> list[float]:
            averages: list[float] = np.asarray(values).reshape(-1, count).mean(axis=1).tolist()
            return averages

        return Scores(values=mean(scores.values), parts={name: mean(part) for name, part in scores.parts.items()})
