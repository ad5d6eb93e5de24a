"""A human preference score from a vision-language model, for images of many kinds.

Reference: HPSv3, https://arxiv.org/abs/2508.03789.
"""

import numpy as np

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.rewards.backbones.vlm_reward import VlmReward


class HPSv3(VlmReward):
    """The mean that HPSv3 gives for an image and its prompt; higher is better."""

    converter = "hpsv3"
    num_parameters = 7_746_378_240  # Qwen2-VL 7B without its language head

    def pictures(self, sample: np.ndarray, prompt: Prompt) -> list[np.ndarray]:
        """Returns the image alone."""
        return [sample]
