"""A human preference score from a vision-language model, for images of many kinds.

Reference: HPSv3, https://arxiv.org/abs/2508.03789.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.rewards.backbones.vlm_reward import VlmReward
from flowgrpo_rc.rewards.base import Reward, Scores


class HPSv3(Reward):
    """The mean that HPSv3 gives for an image and its prompt; higher is better.

    Args:
      path: the folder that `examples/convert_reward.py hpsv3` makes from the published checkpoint.
      device: auto (the GPU of this process, or the CPU), cpu, cuda, cuda:1.
      dtype: fp32, bf16 or fp16; of the model, while its head is fp32.
      batch_size: images in one forward.
    """

    num_parameters = 7_746_378_240  # Qwen2-VL 7B without its language head

    def __init__(
        self, *, path: str, device: str = "auto", dtype: str = "bf16", batch_size: int = 8
    ) -> None:
        self._model = VlmReward(
            path=path, converter="hpsv3", device=device, dtype=dtype, batch_size=batch_size
        )

    def __call__(self, samples: np.ndarray, prompts: Sequence[Prompt]) -> Scores:
        means = self._model.means(
            [[image] for image in samples], [prompt.text for prompt in prompts]
        )
        return Scores(values=means.mean(1).tolist())
