"""Grids of sampled images or videos with captions.

Evaluations use the same prompts and seeds each time, so two grids can be compared.

Shapes: N samples, F frames of a video, H x W pixels.
"""

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.files import write_atomic
from flowgrpo_rc.monitoring.pictures import PictureFacts
from flowgrpo_rc.pictures import read_picture
from flowgrpo_rc.reading import blaming, parse_mapping
from flowgrpo_rc.records.metrics_file import Row, as_json
from flowgrpo_rc.rewards.base import Samples

_COLUMNS = 8
_MIN_SIDE = 128
_MAX_SIDE = 256
_GAP = 8
_FONT_SIZE = 14
_CAPTION_HEIGHT = 20
_FRAMES_PER_SECOND = 16
_BACKGROUND = "white"
_INK = "#333333"
_TILES = "flowgrpo_rc.tiles"  # the text of a PNG that says where its images are, and of what


class Shown(NamedTuple):
    """The part of a batch's samples that people may see; empty if they come from files."""

    prompts: Sequence[Prompt] = ()
    texts: Sequence[str] = ()  # empty for images and videos
    facts: PictureFacts | None = None  # of pictures that were decoded

    @classmethod
    def of(cls, samples: Samples | None, prompts: Sequence[Prompt]) -> "Shown":
        """Takes what is kept of a chunk's samples: images, videos or texts; None if not decoded."""
        if samples is None:
            return cls(prompts)
        if not isinstance(samples, np.ndarray):
            return cls(prompts, list(samples))
        return cls(prompts, facts=PictureFacts.of(samples))

    def select(self, index: Sequence[int]) -> "Shown":
        """Returns what is kept of the samples at the positions `index`."""
        return Shown(
            [self.prompts[row] for row in index],
            [self.texts[row] for row in index] if self.texts else (),
            None if self.facts is None else PictureFacts(*(c[[*index]] for c in self.facts)),
        )

    @classmethod
    def join(cls, chunks: "Sequence[Shown]") -> "Shown":
        """Joins what is kept of several chunks, in order."""
        facts = [chunk.facts for chunk in chunks if chunk.facts is not None]
        return cls(
            [prompt for chunk in chunks for prompt in chunk.prompts],
            [text for chunk in chunks for text in chunk.texts],
            PictureFacts.join(facts) if facts else None,
        )


class Tile(NamedTuple):
    """One sample of a grid; the score is the last word of its caption, the subject the rest."""

    image: Image.Image
    subject: str
    score: str
    prompt: str


def image_grid(
    images: np.ndarray, captions: Sequence[str], prompts: Sequence[str] = ()
) -> Image.Image:
    """Makes a grid of images [N, H, W, 3] uint8, each above its caption, cut to its width.

    Small images are enlarged by whole pixels, and large ones reduced to 256 pixels.
    """
    tiles = [_resized(Image.fromarray(image)) for image in images]
    columns = min(_COLUMNS, len(tiles))
    rows = -(-len(tiles) // columns)
    width = tiles[0].width + _GAP
    height = tiles[0].height + _CAPTION_HEIGHT + _GAP
    grid = Image.new("RGB", (columns * width + _GAP, rows * height + _GAP), _BACKGROUND)
    draw = ImageDraw.Draw(grid)
    font = ImageFont.load_default(_FONT_SIZE)
    for position, (tile, caption) in enumerate(zip(tiles, captions, strict=True)):
        left = _GAP + position % columns * width
        top = _GAP + position // columns * height
        grid.paste(tile, (left, top))
        text = _fitted(caption, font, tile.width)
        draw.text(
            (left + tile.width / 2, top + tile.height + 3), text, fill=_INK, font=font, anchor="mt"
        )
    layout = {"size": tiles[0].size, "columns": columns, "captions": [*captions]}
    grid.info[_TILES] = json.dumps(layout | {"prompts": [*prompts]})
    return grid


def read_grid(path: Path) -> list[Tile]:
    """Returns the images of a file of `save_grid`.

    Raises ValueError if the file is damaged or has too many pixels, or no such images are in it.
    """
    with blaming(path):
        with Image.open(path) as grid:
            grid.load()
        return _tiles(grid, parse_mapping(grid.info[_TILES]))


def _tiles(grid: Image.Image, layout: Row) -> list[Tile]:
    width, height = layout["size"]
    columns = layout["columns"]
    captions = layout["captions"]
    prompts = layout.get("prompts") or [caption.rpartition(" ")[0] for caption in captions]
    if not (width > 0 and 0 < columns * (width + _GAP) < grid.width):
        raise ValueError(f"it has no {columns} columns of images of {width} pixels")
    if not (height > 0 and -(-len(captions) // columns) * height < grid.height):
        raise ValueError(f"it has no {len(captions)} images of {height} pixels")
    tiles = []
    for position, (caption, prompt) in enumerate(zip(captions, prompts, strict=True)):
        row, column = divmod(position, columns)
        left = _GAP + column * (width + _GAP)
        top = _GAP + row * (height + _CAPTION_HEIGHT + _GAP)
        subject, _, score = caption.rpartition(" ")
        image = grid.crop((left, top, left + width, top + height))
        tiles.append(Tile(image, subject, score, prompt))
    return tiles


def save_grid(
    path: Path, images: np.ndarray, captions: Sequence[str], prompts: Sequence[str] = ()
) -> Image.Image:
    """Writes `image_grid` as a PNG, whole or not at all, and returns it."""
    grid = image_grid(images, captions, prompts)
    write_atomic(path, png_bytes(grid))
    return grid


def png_bytes(picture: np.ndarray | Image.Image) -> bytes:
    """Returns a picture as a PNG, which says where its tiles are if it is a grid."""
    image = picture if isinstance(picture, Image.Image) else Image.fromarray(picture)
    text = PngInfo()
    if _TILES in image.info:
        text.add_itxt(_TILES, image.info[_TILES])
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", pnginfo=text)
    return buffer.getvalue()


def with_sources(images: np.ndarray, prompts: Sequence[Prompt]) -> np.ndarray:
    """Puts the first condition image of each prompt to the left of its sample, [N, H, 2 W, 3].

    The images stay as they are if a prompt has no condition image.
    """
    if not all(prompt.images for prompt in prompts):
        return images
    height, width = images.shape[1:3]
    sources = [
        np.asarray(Image.fromarray(read_picture(prompt.images[0])).resize((width, height)))
        for prompt in prompts
    ]
    return np.concatenate([np.stack(sources), images], axis=2)


def film_strips(videos: np.ndarray) -> np.ndarray:
    """Returns images [N, H, 3 W, 3]: first, middle and last frame of videos [N, F, H, W, 3]."""
    last = videos.shape[1] - 1
    return np.concatenate([videos[:, frame] for frame in (0, last // 2, last)], axis=2)


def save_animation(path: Path, videos: np.ndarray, captions: Sequence[str]) -> None:
    """Writes grids of all frames of videos [N, F, H, W, 3] as an animated WebP, or nothing."""
    first, *rest = (image_grid(videos[:, frame], captions) for frame in range(videos.shape[1]))
    buffer = io.BytesIO()
    duration = round(1000 / _FRAMES_PER_SECOND)
    first.save(buffer, format="WEBP", save_all=True, append_images=rest, duration=duration, loop=0)
    write_atomic(path, buffer.getvalue())


def save_texts(
    path: Path, texts: Sequence[str], prompts: Sequence[Prompt], scores: Sequence[float]
) -> None:
    """Writes one JSON object a line: prompt, target, completion, score (null if unknown)."""
    lines = []
    for prompt, text, score in zip(prompts, texts, scores, strict=True):
        row = {"prompt": prompt.text, "target": prompt.target}
        row |= {"completion": text, "score": as_json(score)}
        lines.append(json.dumps(row, ensure_ascii=False) + "\n")
    write_atomic(path, "".join(lines).encode())


def _resized(image: Image.Image) -> Image.Image:
    side = max(image.size)
    if side > _MAX_SIDE:
        ratio = _MAX_SIDE / side
        size = (max(1, round(image.width * ratio)), max(1, round(image.height * ratio)))
        return image.resize(size, Image.Resampling.LANCZOS)
    factor = -(-_MIN_SIDE // side)
    return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)


def _fitted(caption: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int) -> str:
    """Returns a caption on one line, cut with an ellipsis if it is wider than `width` pixels."""
    line = " ".join(caption.split())
    if font.getlength(line) <= width:
        return line
    while line and font.getlength(line + "...") > width:
        line = line[:-1]
    return line.rstrip() + "..."
