"""A human preference score for edited images: source, result and instruction are seen together.

Reference: EditReward, https://arxiv.org/abs/2509.26346.
"""

import numpy as np

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.pictures import read_picture
from flowgrpo_rc.rewards.backbones.vlm_reward import VlmReward
from flowgrpo_rc.rewards.base import prompt_name


class EditReward(VlmReward):
    """The mean over the heads of EditReward, one about the instruction and one about looks."""

    converter = "edit_reward"
    requires_images = True
    num_parameters = 7_747_169_280  # Qwen2.5-VL 7B without its language head

    def pictures(self, sample: np.ndarray, prompt: Prompt) -> list[np.ndarray]:
        """Returns the source, the first image of the prompt, and the result."""
        if not prompt.images:
            raise ValueError(f"{prompt_name(prompt)} has no image to compare")
        return [read_picture(prompt.images[0]), sample]
