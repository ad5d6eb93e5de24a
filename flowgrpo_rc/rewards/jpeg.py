"""The size of an image as a JPEG file: a reward that needs no model, for trying things out.

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
    """incompressibility = file size in kB (1000 bytes); compressibility = -size, as DDPO defines
    both.

    The flow_grpo code divides compressibility by 500: weight 0.002 gives its numbers. Encoded by
    Pillow.

    objective: "compressibility" or "incompressibility".
    quality: of the JPEG encoder, 1 to 95.

    Raises ValueError for an unknown objective or a quality out of range.
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
    """Size in kB (1000 bytes) of image [H, W, 3] uint8 RGB as a JPEG file."""
    file = BytesIO()
    Image.fromarray(image).save(file, format="JPEG", quality=quality)
    return file.tell() / 1000
