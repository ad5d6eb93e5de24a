"""A reward for how well an image fits its prompt, by the cosine of CLIP.

Reference: CLIPScore, https://arxiv.org/abs/2104.08718.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.plugins import build
from flowgrpo_rc.rewards.backbones.clip import Clip
from flowgrpo_rc.rewards.base import Reward, Scores


class ClipScore(Reward):
    """The cosine of image and prompt, from -1 to 1.

    CLIPScore is 2.5 times the positive part of the cosine; a weight of 2.5 gives its numbers. Here
    the score may be negative; it still ranks images that fit badly.

    Args:
      path: the CLIP checkpoint, a local folder or a hub id.
      options: `processor`, `device`, `dtype` and `batch_size` of `Clip`.

    Raises:
      ValueError: `Clip` refuses an option.
    """

    num_parameters = 427_616_513  # CLIP ViT-L/14

    def __init__(self, *, path: str = "openai/clip-vit-large-patch14", **options: Any) -> None:
        self._clip = build(Clip, {"path": path, **options}, "Clip")

    def __call__(self, samples: np.ndarray, prompts: Sequence[Prompt]) -> Scores:
        return Scores(
            values=self._clip.cosines(samples, [prompt.text for prompt in prompts]).tolist()
        )
