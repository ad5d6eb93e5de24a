"""Measures how well the bundled model writes: the OCR reward of pictures from the stock pipeline.

Legend: N pictures, H and W height and width in pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
import torch
from diffusers import StableDiffusion3Pipeline

from bundled_models import glyphs, tiny_sd3
from flowgrpo_rc.batch import Prompt

NUM_INFERENCE_STEPS = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Readability:
    """The legibility of pictures of words.

    Attributes:
      reward: mean OCR reward.
      exact: fraction of pictures in which OCR reads exactly the word.
    """

    reward: float
    exact: float


def readability(images: np.ndarray, words: Sequence[str]) -> Readability:
    """Scores pictures that should show words.

    Args:
      images: uint8, [N, H, W, 3].
      words: the word of each picture.

    Returns:
      The mean scores.
    """
    from flowgrpo_rc.rewards.ocr import OCR

    prompts = [
        Prompt(text=glyphs.prompt(word), index=i, target=word) for i, word in enumerate(words)
    ]
    scores = OCR()(images, prompts)
    return Readability(reward=fmean(scores.values), exact=fmean(scores.parts["exact"]))


def generate(
    pipe: StableDiffusion3Pipeline,
    words: Sequence[str],
    *,
    seed: int,
    guidance_scale: float = 1.0,
    batch_size: int = 128,
) -> np.ndarray:
    """Samples one picture of each word with the stock pipeline, by Euler's method.

    Args:
      pipe: the pipeline.
      words: N words.
      seed: seed of the noise.
      guidance_scale: scale of classifier-free guidance; 1 for none.
      batch_size: pictures of one call.

    Returns:
      uint8, [N, H, W, 3].
    """
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for start in range(0, len(words), batch_size):
        output = pipe(
            [glyphs.prompt(word) for word in words[start : start + batch_size]],
            height=glyphs.HEIGHT,
            width=glyphs.WIDTH,
            num_inference_steps=NUM_INFERENCE_STEPS,
            guidance_scale=guidance_scale,
            max_sequence_length=tiny_sd3.MAX_TEXT_LENGTH,
            generator=generator,
            output_type="np",
        )
        batches.append((output.images * 255).round().astype(np.uint8))
    return np.concatenate(batches)
