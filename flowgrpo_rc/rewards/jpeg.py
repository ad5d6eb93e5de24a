"""A reward for the size of an image as a JPEG file. It needs no model: good for a first try.

Reference: DDPO, https://arxiv.org/abs/2305.13301.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO

import numpy as np
from PIL import Image

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.plugins import check_choice
from flowgrpo_rc.rewards.base import Reward, Scores, check_range

SIGNS = {"compressibility": -1.0, "incompressibility": 1.0}


@dataclass(kw_only=True, eq=False)
class Jpeg(Reward):
    """The file size in kB (1000 bytes), or minus that size, as DDPO defines both.

    flow_grpo divides compressibility by 500; a weight of 0.002 gives its numbers. Pillow encodes.
    """

    objective: str = "compressibility"  # minus the size; "incompressibility" is the size
    quality: int = 95  # of the JPEG encoder, 1 to 95

    def __post_init__(self) -> None:
        check_choice("objective", self.objective, SIGNS)
        check_range(1, 95, quality=self.quality)

    def __call__(self, samples: np.ndarray, prompts: Sequence[Prompt]) -> Scores:
        return Scores(values=[SIGNS[self.objective] * self._kilobytes(image) for image in samples])

    def _kilobytes(self, image: np.ndarray) -> float:
        file = BytesIO()
        Image.fromarray(image).save(file, format="JPEG", quality=self.quality)
        return file.tell() / 1000
