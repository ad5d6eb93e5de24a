"""Short random words and pictures of them: the data set of the bundled model.

Every draw comes from the numpy Generator that is passed in.

Legend: N pictures, H and W height and width in pixels.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache

import numpy as np
from PIL import Image, ImageDraw, ImageFont

ALPHABET = "ABCDEFGHJKLMNPQRSTUVWXYZ23456789"  # without O, 0, I and 1, which look alike
WORD_LENGTHS = (3, 4, 5)
HEIGHT = 32  # of a picture, in pixels
WIDTH = 64

# Length of a word -> smallest and largest font size that is tried, in pixels.
_FONT_SIZES = {3: (22, 25), 4: (19, 22), 5: (16, 18)}
_MARGIN = 1


def prompt(word: str) -> str:
    """Returns the prompt of a word, which is the word in double quotes."""
    return f'"{word}"'


def random_word(rng: np.random.Generator) -> str:
    """Draws a word of three to five letters or digits, each length equally likely."""
    length = rng.choice(WORD_LENGTHS)
    return "".join(ALPHABET[i] for i in rng.integers(len(ALPHABET), size=length))


def distinct_words(
    count: int, rng: np.random.Generator, *, exclude: Collection[str] = ()
) -> list[str]:
    """Draws different words.

    Args:
      count: number of words.
      rng: draws the words.
      exclude: words that are not returned.

    Returns:
      The words, in the order in which they were drawn.
    """
    excluded = frozenset(exclude)
    words: dict[str, None] = {}  # a set that keeps its order
    word = random_word(rng)
    while len(words) < count:
        if word not in excluded:
            words[word] = None
        word = random_word(rng)
    return list(words)


def render(word: str, rng: np.random.Generator) -> np.ndarray:
    """Draws a picture of a word: dark letters in the middle of a light background.

    Args:
      word: the word.
      rng: draws the colours, the size of the font and small shifts.

    Returns:
      RGB, uint8, [HEIGHT, WIDTH, 3].
    """
    background = tuple(rng.integers(205, 256, size=3).tolist())
    foreground = tuple(rng.integers(0, 91, size=3).tolist())
    font, (left, top, right, bottom) = _fitting_font(word, rng)
    x = (WIDTH - left - right) / 2 + rng.integers(-1, 2)
    y = (HEIGHT - top - bottom) / 2 + rng.integers(-2, 3)
    image = Image.new("RGB", (WIDTH, HEIGHT), background)
    ImageDraw.Draw(image).text((x, y), word, fill=foreground, font=font)
    return np.asarray(image)


def render_all(words: Sequence[str], rng: np.random.Generator) -> np.ndarray:
    """Draws one picture of each word, as `render` does: uint8, [N, HEIGHT, WIDTH, 3]."""
    return np.stack([render(word, rng) for word in words])


def grid(images: np.ndarray, *, columns: int = 8, scale: int = 2, gap: int = 2) -> Image.Image:
    """Puts pictures side by side on grey, row by row.

    Args:
      images: uint8, [N, H, W, 3].
      columns: pictures of one row.
      scale: how many times to enlarge them.
      gap: grey pixels between pictures, before they are enlarged.

    Returns:
      One picture of all.
    """
    count, height, width, _ = images.shape
    rows = -(-count // columns)  # rounded up
    canvas = np.full((rows * (height + gap), columns * (width + gap), 3), 128, np.uint8)
    for i, image in enumerate(images):
        y = (i // columns) * (height + gap)
        x = (i % columns) * (width + gap)
        canvas[y : y + height, x : x + width] = image
    return Image.fromarray(canvas).resize(
        (canvas.shape[1] * scale, canvas.shape[0] * scale), Image.Resampling.NEAREST
    )


def _fitting_font(
    word: str, rng: np.random.Generator
) -> tuple[ImageFont.FreeTypeFont, tuple[float, ...]]:
    """A font of random size, shrunk until the word fits, and the bounding box of the word in it."""
    smallest, largest = _FONT_SIZES[len(word)]
    size = int(rng.integers(smallest, largest + 1))
    while True:
        font = font_of(size)
        box = font.getbbox(word)
        if box[2] - box[0] <= WIDTH - 2 * _MARGIN:
            return font, box
        size -= 1


@cache
def font_of(size: int) -> ImageFont.FreeTypeFont:
    """Returns Pillow's own scalable font, so that no font file has to ship with the package.

    Args:
      size: in pixels.
    """
    font = ImageFont.load_default(size)
    assert isinstance(font, ImageFont.FreeTypeFont), "this Pillow was built without FreeType"
    return font
