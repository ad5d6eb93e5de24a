"""Pictures of words in several shades: the data of the bundled editing task.

Every draw comes from the numpy Generator that is passed in.

Legend: H and W height and width in pixels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

from bundled_models import glyphs

SIDE = 64  # of a picture, in pixels: the least that the stock pipeline edits
# Shades of grey alone: the VAE of the bundled SD3, which is used as it is, has seen no others.
SHADES: Mapping[str, int] = {"black": 20, "slate": 70, "grey": 120, "silver": 170}
NAMES = tuple(SHADES)
_FONT_SIZE = 25
_WORD_LENGTH = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """A word on a background. Its pictures differ by the word's shade alone.

    Attributes:
      word: three letters or digits.
      background: RGB.
      shift: of the word from the middle, in pixels to the right and down.
    """

    word: str
    background: tuple[int, int, int]
    shift: tuple[int, int]

    def picture(self, shade: int) -> np.ndarray:
        """Draws the word in a shade from 0 (black) to 255: RGB, uint8, [SIDE, SIDE, 3]."""
        font = glyphs.font_of(_FONT_SIZE)
        left, top, right, bottom = font.getbbox(self.word)
        x = (SIDE - left - right) / 2 + self.shift[0]
        y = (SIDE - top - bottom) / 2 + self.shift[1]
        image = Image.new("RGB", (SIDE, SIDE), self.background)
        ImageDraw.Draw(image).text((x, y), self.word, fill=(shade,) * 3, font=font)
        return np.asarray(image)


def instruction(name: str) -> str:
    """Returns the prompt that asks for a shade of `SHADES`."""
    return f"make the word {name}"


def draw_scenes(count: int, rng: np.random.Generator) -> list[Scene]:
    """Draws words on light backgrounds, each somewhere else.

    Args:
      count: how many.
      rng: draws.
    """
    scenes = []
    for _ in range(count):
        letters = rng.integers(len(glyphs.ALPHABET), size=_WORD_LENGTH)
        red, green, blue = rng.integers(215, 256, size=3).tolist()
        shift = (int(rng.integers(-2, 3)), int(rng.integers(-14, 15)))
        word = "".join(glyphs.ALPHABET[i] for i in letters)
        scenes.append(Scene(word=word, background=(red, green, blue), shift=shift))
    return scenes
