"""A reward for which image people would pick: a CLIP trained on their choices.

Reference: PickScore, https://arxiv.org/abs/2305.01569.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.plugins import build
from flowgrpo_rc.rewards.backbones.clip import Clip
from flowgrpo_rc.rewards.base import Reward, Scores


class PickScore(Reward):
    """The cosine of image and prompt times the model's scale, about 15 to 26.

    flow_grpo divides it by 26; a weight of 0.03846 gives its numbers.

    Args:
      path: the checkpoint, a local folder or a hub id.
      processor: its image processor and tokenizer. The published checkpoint takes them from the
        CLIP that it was trained from.
      options: `device`, `dtype` and `batch_size` of `Clip`.

    Raises:
      ValueError: `Clip` refuses an option.
    """

    num_parameters = 986_109_441  # CLIP ViT-H/14

    def __init__(
        self,
        *,
        path: str = "yuvalkirstain/PickScore_v1",
        processor: str = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K",
        **options: Any,
    ) -> None:
        self._clip = build(Clip, {"path": path, "processor": processor, **options}, "Clip")

    def __call__(self, samples: np.ndarray, prompts: Sequence[Prompt]) -> Scores:
        cosines = self._clip.cosines(samples, [prompt.text for prompt in prompts])
        return Scores(values=(cosines * self._clip.logit_scale()).tolist())
