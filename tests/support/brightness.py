"""A reward for images and for videos that a run can name."""

from __future__ import annotations

import numpy as np

from flowgrpo_rc.batch import Prompt


def brightness(sample: np.ndarray, prompt: Prompt) -> float:
    """Returns the mean of all pixels, from 0 to 1."""
    return float(sample.mean()) / 255
