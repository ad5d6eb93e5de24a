"""A reward for how well an OCR model reads the target text in a video: the mean over its frames."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.plugins import build
from flowgrpo_rc.rewards.base import Reward, Scores
from flowgrpo_rc.rewards.frames import check_every, mean_over_frames
from flowgrpo_rc.rewards.ocr import OCR


class VideoOCR(Reward):
    """The mean score of every `every`-th frame of videos [N, F, H, W, 3], by the `ocr` reward.

    Flow-GRPO's video reward leaves out frames that score 0. Here they count, so the text has to
    stay.

    Args:
      every: distance between the frames that are scored.
      options: options of the `ocr` reward.

    Raises:
      ValueError: `every` is below 1, or the `ocr` reward refuses an option.
    """

    kind = "video"
    part_names = OCR.part_names
    requires_target = True

    def __init__(self, *, every: int = 8, **options: Any) -> None:
        check_every(every)
        self.every = every
        self._images = build(OCR, options, "ocr")

    def check(self) -> None:
        """Raises ValueError if the OCR engine cannot start."""
        self._images.check()

    def __call__(self, samples: np.ndarray, prompts: Sequence[Prompt]) -> Scores:
        return mean_over_frames(self._images, samples, prompts, self.every)
