"""A reward for how well a video fits its prompt: the mean of the `clip` reward over its frames."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.plugins import build
from flowgrpo_rc.rewards.base import Reward, Scores
from flowgrpo_rc.rewards.clip import ClipScore
from flowgrpo_rc.rewards.frames import check_every, mean_over_frames


class VideoClip(Reward):
    """The mean score of every `every`-th frame of videos [N, F, H, W, 3], by the `clip` reward.

    Args:
      every: distance between the frames that are scored.
      options: options of the `clip` reward.

    Raises:
      ValueError: `every` is below 1, or the `clip` reward refuses an option.
    """

    kind = "video"

    def __init__(self, *, every: int = 8, **options: Any) -> None:
        check_every(every)
        self.every = every
        self._images = build(ClipScore, options, "clip")

    def __call__(self, samples: np.ndarray, prompts: Sequence[Prompt]) -> Scores:
        return mean_over_frames(self._images, samples, prompts, self.every)
