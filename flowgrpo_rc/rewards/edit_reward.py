"""A human preference score for edited images: source, result and instruction are seen together.

Reference: EditReward, https://arxiv.org/abs/2509.26346.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.pictures import read_picture
from flowgrpo_rc.rewards.backbones.vlm_reward import VlmReward
from flowgrpo_rc.rewards.base import Reward, Scores


class EditReward(Reward):
    """The mean over the heads of EditReward, of which one is about the instruction and one looks.

    The source is the first image of the prompt.

    Args:
      path: the folder that `examples/convert_reward.py edit_reward` makes from the published
        checkpoint.
      device: auto (the GPU of this process, or the CPU), cpu, cuda, cuda:1.
      dtype: fp32, bf16 or fp16; of the model, while its heads are fp32.
      batch_size: images in one forward.
    """

    requires_images = True
    num_parameters = 7_747_169_280  # Qwen2.5-VL 7B without its language head

    def __init__(
        self, *, path: str, device: str = "auto", dtype: str = "bf16", batch_size: int = 8
    ) -> None:
        self._model = VlmReward(
            path=path, converter="edit_reward", device=device, dtype=dtype, batch_size=batch_size
        )

    def __call__(self, samples: np.ndarray, prompts: Sequence[Prompt]) -> Scores:
        pictures = []
        for sample, prompt in zip(samples, prompts, strict=True):
            if not prompt.images:
                raise ValueError(f"prompt {prompt.index} ({prompt.text!r}) has no image to compare")
            pictures.append([read_picture(prompt.images[0]), sample])
        means = self._model.means(pictures, [prompt.text for prompt in prompts])
        return Scores(values=means.mean(1).tolist())
