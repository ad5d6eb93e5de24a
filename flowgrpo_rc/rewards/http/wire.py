"""The format in which samples travel: JSON with images as PNG files in base64, never pickle.

A request is {"kind": ..., "samples": [...], "prompts": [...]}. A sample of kind image is a PNG, of
kind video a list of PNGs, of kind text the text itself. A prompt has the fields of `Prompt`; its
images are whole files in base64, and are left out if it has none. An answer is {"values": [...],
"parts": {name: [...]}} with one number for each sample, or null for one that could not be scored.

Shapes: N samples, F frames of a video, H x W pixels.
"""

import base64
import binascii
import math
from collections.abc import Sequence
from dataclasses import asdict
from io import BytesIO
from types import NoneType
from typing import Any

import numpy as np
from PIL import Image

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.pictures import picture_bytes, picture_size, rgb_pixels
from flowgrpo_rc.rewards.base import Samples, Scores, finite_numbers

PATH = "/v1/score"
MAX_PIXELS = 2**26  # of all images of a request together: 64 images of 1024 x 1024
_PROMPT_TYPES: dict[str, type | tuple[type, ...]] = {
    "text": str,
    "index": int,
    "target": (str, NoneType),
    "negative_text": str,
    "metadata": dict,
    "images": list,
}


def encode(samples: Samples, prompts: Sequence[Prompt]) -> dict[str, object]:
    """Makes the request for the scores of N images, videos or texts."""
    rows = [_row(prompt) for prompt in prompts]
    if not isinstance(samples, np.ndarray):
        return {"kind": "text", "samples": list(samples), "prompts": rows}
    if samples.ndim == 4:
        images = [encode_png(image) for image in samples]
        return {"kind": "image", "samples": images, "prompts": rows}
    videos = [[encode_png(frame) for frame in video] for video in samples]
    return {"kind": "video", "samples": videos, "prompts": rows}


def decode(request: object, kind: str = "any") -> tuple[Samples, list[Prompt]]:
    """Returns samples and prompts of a request to a reward that scores this kind.

    Raises ValueError if the request is malformed, or holds samples of another kind.
    """
    match request:
        case {"kind": str(sent), "samples": [_, *_] as samples, "prompts": list(rows), **rest} if (
            len(samples) == len(rows) and not rest
        ):
            if kind not in (sent, "any"):
                raise ValueError(f"this reward scores {kind}s, not {sent}s")
            return _decoded(sent, samples), [_prompt(row) for row in rows]
    raise ValueError(
        "a request is an object with kind, samples and prompts, and nothing else; it has as many "
        "samples as prompts, and at least one"
    )


def encode_scores(scores: Scores) -> dict[str, object]:
    """Makes the answer with the scores; NaN becomes null."""

    def column(values: Sequence[float]) -> list[float | None]:
        return [None if math.isnan(value) else value for value in finite_numbers(values)]

    columns = {name: column(values) for name, values in scores.parts.items()}
    return {"values": column(scores.values), "parts": columns}


def decode_scores(answer: object, part_names: Sequence[str], count: int) -> Scores:
    """Reads the scores of `count` samples; null becomes NaN. ValueError for a malformed answer."""
    columns = answer if isinstance(answer, dict) else {}
    further = columns.get("parts")
    further = further if isinstance(further, dict) else {}
    return Scores(
        values=_column("values", columns.get("values"), count),
        parts={name: _column(f"part {name!r}", further.get(name), count) for name in part_names},
    )


def encode_png(image: np.ndarray) -> str:
    """Returns an image [H, W, 3] uint8 as a PNG file in base64."""
    file = BytesIO()
    Image.fromarray(image).save(file, format="PNG", compress_level=1)
    return base64.b64encode(file.getvalue()).decode("ascii")


def decode_png(text: str, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """Returns the image [H, W, 3] uint8 of a PNG file in base64. ValueError for all else."""
    try:
        with Image.open(BytesIO(base64.b64decode(text, validate=True)), formats=["PNG"]) as image:
            if image.width * image.height > max_pixels:
                raise ValueError(f"{image.width} x {image.height} pixels are too many")
            return rgb_pixels(image)
    except (TypeError, binascii.Error, OSError, SyntaxError, Image.DecompressionBombError) as error:
        kind = type(error).__name__
        raise ValueError(f"an image must be a PNG file in base64 ({kind})") from error


def _decoded(kind: str, samples: list[Any]) -> Samples:
    if kind == "text" and all(isinstance(sample, str) for sample in samples):
        return samples
    if kind == "image":
        return _stack(samples)
    lengths = {len(sample) if isinstance(sample, list) else 0 for sample in samples}
    if kind == "video" and len(lengths) == 1 and lengths != {0}:
        frames = _stack([frame for sample in samples for frame in sample])
        return frames.reshape(len(samples), -1, *frames.shape[1:])
    raise ValueError(
        f"kind={kind!r} and its samples must be text and strings, image and PNG files in base64, "
        "or video and lists of such images, all of one length"
    )


def _stack(encoded: Sequence[str]) -> np.ndarray:
    images = []
    left = MAX_PIXELS  # the pixels that the images to come may have
    for text in encoded:
        images.append(decode_png(text, left))
        left -= images[-1].shape[0] * images[-1].shape[1]
    if len({image.shape for image in images}) > 1:
        raise ValueError("all images of a request must have one size")
    return np.stack(images)


def _row(prompt: Prompt) -> dict[str, object]:
    row = {**asdict(prompt), "metadata": dict(prompt.metadata)}
    del row["messages"]  # a server scores what the user says
    images = row.pop("images")
    files = [base64.b64encode(picture_bytes(image)).decode("ascii") for image in images]
    return row | ({"images": files} if files else {})


def _prompt(row: object) -> Prompt:
    """Returns a prompt, of whose images the sizes are looked at before anybody decodes them."""
    fields: dict[str, Any] = row if isinstance(row, dict) else {"prompt": row}
    for name, value in fields.items():
        if not isinstance(value, _PROMPT_TYPES.get(name, ())):
            raise ValueError(
                "a prompt is an object with text, target, negative_text (strings), index (a whole "
                "number), metadata (an object) and images (a list of files), not "
                f"{name}={value!r:.99}"
            )
    try:
        files = fields.get("images", [])
        images = tuple(base64.b64decode(file, validate=True) for file in files)
    except (TypeError, binascii.Error) as error:
        raise ValueError("a prompt's images must be files in base64") from error
    if sum(math.prod(picture_size(image)) for image in images) > MAX_PIXELS:
        raise ValueError("a prompt's images have too many pixels for one request")
    return Prompt(**{"text": "", "index": 0, **fields, "images": images})


def _column(name: str, values: object, count: int) -> list[float]:
    numbers = values if isinstance(values, list) else []
    known = all(type(number) in (int, float, NoneType) for number in numbers)
    if len(numbers) != count or not known:
        raise ValueError(f"the {name} of the answer must be a list of {count} numbers, some null")
    return [math.nan if number is None else float(number) for number in numbers]
