"""A reward for the size of an image as a JPEG file. It needs no model: good for a first try.

Reference: DDPO, https://arxiv.org/abs/2305.13301.
"""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO

import numpy as np
from PIL import Image

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.rewards.base import Reward, Scores

SIGNS = {"compressibility": -1.0, "incompressibility": 1.0}


class Jpeg(Reward):
    """The file size in kB (1000 bytes), or minus that size, as DDPO defines both.

    flow_grpo divides compressibility by 500; a weight of 0.002 gives its numbers. Pillow encodes.

    Args:
      objective: "compressibility" for minus the size, "incompressibility" for the size.
      quality: quality of the JPEG encoder, 1 to 95.
    """

    def __init__(self, *, objective: str = "compressibility", quality: int = 95) -> None:
        if objective not in SIGNS:
            raise ValueError(f"objective={objective!r} is not one of {', '.join(SIGNS)}")
        if quality not in range(1, 96):
            raise ValueError(f"quality={quality!r} is not between 1 and 95")
        self.sign = SIGNS[objective]
        self.quality = quality

    def __call__(self, samples: np.ndarray, prompts: Sequence[Prompt]) -> Scores:
        return Scores(values=[self.sign * jpeg_kilobytes(image, self.quality) for image in samples])


def jpeg_kilobytes(image: np.ndarray, quality: int) -> float:
    """Returns the size in kB (1000 bytes) of an image [H, W, 3] uint8 RGB as a JPEG file."""
    file = BytesIO()
    Image.fromarray(image).save(file, format="JPEG", quality=quality)
    return file.tell() / 1000
