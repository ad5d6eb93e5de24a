"""How well an OCR model reads the target text in a video: the mean over its frames."""

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
    """The mean score of every `every`-th frame [N, F, H, W, 3], by the `ocr` reward with its
    options.

    Flow-GRPO's video reward leaves out frames that score 0; here they count, so that text has to
    stay. Raises ValueError for a number below 1, and as `ocr` does.
    """

    kind = "video"
    part_names = OCR.part_names
    requires_target = True

    def __init__(self, *, every: int = 8, **options: Any) -> None:
        check_every(every)
        self.every = every
        self._images = build(OCR, options, "ocr")

    def __call__(self, samples: np.ndarray, prompts: Sequence[Prompt]) -> Scores:
        return mean_over_frames(self._images, samples, prompts, self.every)
