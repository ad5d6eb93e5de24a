"""Reward for edits that give the letters of a picture another colour and leave the rest alone.

Shapes: N images of H x W pixels.
"""

import math
from collections.abc import Sequence

import numpy as np
from PIL import Image

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.pictures import read_picture
from flowgrpo_rc.rewards.base import Reward, Scores, prompt_name

_FULL = 0.5  # from this share of ink on, a pixel belongs to a letter
_EMPTY = 0.05  # up to this share it belongs to the background
_LEAST_CONTRAST = 30.0  # between letters and background, in levels of 256
_TOLERATED = 64.0  # a background that is off by so many levels counts nothing


class LetterColour(Reward):
    """Compares each image with its prompt's first image, as it would be with other letters.

        painted = 1 - mean |image - wanted| / mean |source - wanted|    over the letters
        kept    = 1 - mean |image - source| / 64                       over the background
        reward  = painted kept

    Both are cut to [0, 1]. A source of another size is brought to that of the image. The colour is
    the key `colour` of the prompt, [red, green, blue] from 0 to 255. The background is that of the
    source's border, its letters are what is farthest from it.
    """

    part_names = ("painted", "kept")

    def check_prompt(self, prompt: Prompt) -> None:
        """Raises ValueError if the prompt has no image or no colour."""
        _colour(prompt)

    def __call__(self, samples: np.ndarray, prompts: Sequence[Prompt]) -> Scores:
        """Scores images [N, H, W, 3]; NaN if a source has no letters."""
        pairs = [_score(image, prompt) for image, prompt in zip(samples, prompts, strict=True)]
        painted, unchanged = zip(*pairs, strict=True)
        return Scores(
            values=[a * b for a, b in pairs], parts={"painted": painted, "kept": unchanged}
        )


def wanted_picture(source: np.ndarray, colour: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """Returns a picture with letters of another colour, and the share of ink in each pixel [H, W].

    The shares are 0 if there are no letters.
    """
    pixels = source.astype(np.float64)
    border = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    background = np.median(border, axis=0)
    distance = np.linalg.norm(pixels - background, axis=2)
    if distance.max() < _LEAST_CONTRAST:
        return pixels, np.zeros_like(distance)
    ink = pixels[distance > 0.9 * distance.max()].mean(axis=0)
    share = ((pixels - background) @ (ink - background)) / ((ink - background) ** 2).sum()
    share = share.clip(0.0, 1.0)
    return pixels + share[..., None] * (np.asarray(colour) - ink), share


def _colour(prompt: Prompt) -> Sequence[float]:
    match prompt.metadata.get("colour"):
        case [int() | float(), int() | float(), int() | float()] as colour if prompt.images and all(
            0 <= level <= 255 for level in colour
        ):
            return colour
    raise ValueError(
        f"{prompt_name(prompt)} has {len(prompt.images)} images and "
        f"colour={prompt.metadata.get('colour')!r}: it needs an image and "
        '"colour": [red, green, blue], from 0 to 255'
    )


def _score(image: np.ndarray, prompt: Prompt) -> tuple[float, float]:
    colour = _colour(prompt)
    source = read_picture(prompt.images[0])
    if source.shape != image.shape:
        source = np.asarray(Image.fromarray(source).resize((image.shape[1], image.shape[0])))
    target, share = wanted_picture(source, colour)
    letters = share > _FULL
    if not letters.any():
        return math.nan, math.nan
    to_go = np.abs(source - target)[letters].mean()
    left = np.abs(image - target)[letters].mean()
    changed = np.abs(image.astype(np.float64) - source)[share < _EMPTY].mean()
    painted = 1 - left / max(to_go, 1.0)
    return float(np.clip(painted, 0, 1)), float(np.clip(1 - changed / _TOLERATED, 0, 1))
