"""Prompts and pictures to be scored."""

from __future__ import annotations

import numpy as np

from flowgrpo_rc.batch import Prompt


def random_images(count: int, size: int = 16, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, size, size, 3), dtype=np.uint8)


def numbered_prompts(count: int, start: int = 0) -> list[Prompt]:
    return [
        Prompt(text=f'a "{index}"', index=index, target=str(index))
        for index in range(start, start + count)
    ]


def sums(*targets: str | None) -> list[Prompt]:
    return [
        Prompt(text=f"{index}+{index}=", index=index, target=target)
        for index, target in enumerate(targets)
    ]


def brightness(sample: np.ndarray, prompt: Prompt) -> float:
    return float(sample.mean()) / 255


def picky(sample: np.ndarray, prompt: Prompt) -> float | None:
    """Scores HELP and TUV2 with 1, K9Q not at all, and other prompts by the brightness."""
    if prompt.target == "K9Q":
        return None
    return 1.0 if prompt.target in ("HELP", "TUV2") else brightness(sample, prompt)
