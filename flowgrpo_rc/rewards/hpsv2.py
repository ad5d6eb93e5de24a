"""A human preference score: a CLIP trained on people's rankings of generated images.

Reference: HPSv2, https://arxiv.org/abs/2306.09341.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.plugins import build
from flowgrpo_rc.rewards.backbones.clip import Clip
from flowgrpo_rc.rewards.base import Reward, Scores


class HPSv2(Reward):
    """The cosine of image and prompt in HPSv2's model, about 0.2 to 0.35.

    Args:
      path: the folder that `examples/convert_reward.py hpsv2` makes from the published checkpoint,
        which has the format of open_clip.
      options: `device`, `dtype` and `batch_size` of `Clip`.

    Raises:
      ValueError: `Clip` refuses an option.
    """

    num_parameters = 986_109_441  # CLIP ViT-H/14

    def __init__(self, *, path: str, **options: Any) -> None:
        self._clip = build(Clip, {"path": path, **options}, "Clip")

    def __call__(self, samples: np.ndarray, prompts: Sequence[Prompt]) -> Scores:
        return Scores(
            values=self._clip.cosines(samples, [prompt.text for prompt in prompts]).tolist()
        )
