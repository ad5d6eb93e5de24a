"""A reward that can be gamed: it likes saturated colours, whatever is drawn (docs/reports.md)."""

from __future__ import annotations

import numpy as np

from flowgrpo_rc.batch import Prompt


def saturation(image: np.ndarray, prompt: Prompt) -> float:
    """Returns the mean saturation of an image [H, W, 3] uint8, as HSV has it: from 0 to 1."""
    highest = image.max(2).astype(float)
    lowest = image.min(2).astype(float)
    return float(((highest - lowest) / np.maximum(highest, 1)).mean())
