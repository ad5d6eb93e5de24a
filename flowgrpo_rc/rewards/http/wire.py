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
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.pictures import picture_bytes, picture_size, rgb_pixels
from flowgrpo_rc.rewards.base import Scores, finite_numbers

PATH = "/v1/score"
KINDS = ("image", "video", "text")
MAX_PIXELS = 2**26  # of all images of a request together: 64 images of 1024 x 1024
_PROMPT_FIELDS = ("text", "index", "target", "negative_text", "metadata", "images")


def encode(samples: Any, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Makes the request for the scores of N images, videos or texts."""
    request: dict[str, Any] = {"prompts": [_row(prompt) for prompt in prompts]}
    if not isinstance(samples, np.ndarray):
        return request | {"kind": "text", "samples": list(samples)}
    if samples.ndim == 4:
        return request | {"kind": "image", "samples": [encode_png(image) for image in samples]}
    videos = [[encode_png(frame) for frame in video] for video in samples]
    return request | {"kind": "video", "samples": videos}


def decode(request: Any) -> tuple[Any, list[Prompt]]:
    """Returns samples and prompts of a request. Raises ValueError if it is malformed."""
    if not isinstance(request, Mapping) or set(request) != {"kind", "samples", "prompts"}:
        raise ValueError("a request is an object with kind, samples and prompts")
    kind, samples, prompts = (request[name] for name in ("kind", "samples", "prompts"))
    if kind not in KINDS or not isinstance(samples, list) or not isinstance(prompts, list):
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, samples and prompts lists")
    if not samples or len(samples) != len(prompts):
        raise ValueError(f"{len(samples)} samples but {len(prompts)} prompts; at least one of each")
    return _decoded(kind, samples), [_prompt(row) for row in prompts]


def encode_scores(scores: Scores) -> dict[str, Any]:
    """Makes the answer with the scores; NaN becomes null."""

    def column(values: Sequence[float]) -> list[float | None]:
        return [None if math.isnan(value) else value for value in finite_numbers(values)]

    columns = {name: column(values) for name, values in scores.parts.items()}
    return {"values": column(scores.values), "parts": columns}


def decode_scores(answer: Any, part_names: Sequence[str], count: int) -> Scores:
    """Reads the scores of `count` samples; null becomes NaN. ValueError for a malformed answer."""
    if not isinstance(answer, Mapping) or not isinstance(answer.get("parts", {}), Mapping):
        raise ValueError("the answer is no object with values and parts")
    columns = answer.get("parts", {})
    missing = [name for name in part_names if name not in columns]
    if missing:
        raise ValueError(f"the answer lacks the part {missing[0]!r}")
    return Scores(
        values=_column(answer.get("values"), count),
        parts={name: _column(columns[name], count) for name in part_names},
    )


def encode_png(image: np.ndarray) -> str:
    """Returns an image [H, W, 3] uint8 as a PNG file in base64."""
    file = BytesIO()
    Image.fromarray(image).save(file, format="PNG", compress_level=1)
    return base64.b64encode(file.getvalue()).decode("ascii")


def decode_png(text: Any, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """Returns the image [H, W, 3] uint8 of a PNG file in base64. ValueError for all else."""
    if not isinstance(text, str):
        raise ValueError("an image must be a PNG file in base64")
    try:
        with Image.open(BytesIO(base64.b64decode(text, validate=True)), formats=["PNG"]) as image:
            if image.width * image.height > max_pixels:
                raise ValueError(f"{image.width} x {image.height} pixels are too many")
            return rgb_pixels(image)
    except (binascii.Error, OSError, SyntaxError, Image.DecompressionBombError) as error:
        kind = type(error).__name__
        raise ValueError(f"an image must be a PNG file in base64 ({kind})") from error


def _decoded(kind: str, samples: list[Any]) -> Any:
    if kind == "text":
        if not all(isinstance(sample, str) for sample in samples):
            raise ValueError("texts must be strings")
        return samples
    if kind == "image":
        return _stack(samples)
    lengths = [len(sample) if isinstance(sample, list) else 0 for sample in samples]
    if not lengths[0] or len(set(lengths)) > 1:
        raise ValueError("videos must be lists of images, all of one length")
    frames = _stack([frame for sample in samples for frame in sample])
    return frames.reshape(len(samples), -1, *frames.shape[1:])


def _stack(encoded: list[Any]) -> np.ndarray:
    images = []
    left = MAX_PIXELS  # the pixels that the images to come may have
    for text in encoded:
        images.append(decode_png(text, left))
        left -= images[-1].shape[0] * images[-1].shape[1]
    if len({image.shape for image in images}) > 1:
        raise ValueError("all images of a request must have one size")
    return np.stack(images)


def _row(prompt: Prompt) -> dict[str, Any]:
    row = {**asdict(prompt), "metadata": dict(prompt.metadata)}
    del row["messages"]  # a server scores what the user says
    images = row.pop("images")
    files = [base64.b64encode(picture_bytes(image)).decode("ascii") for image in images]
    return row | ({"images": files} if files else {})


def _images(files: Any) -> tuple[bytes, ...]:
    """Returns the images of a prompt, whose sizes are looked at before anybody decodes them."""
    if not isinstance(files, list) or not all(isinstance(file, str) for file in files):
        raise ValueError("a prompt's images must be files in base64")
    try:
        images = tuple(base64.b64decode(file, validate=True) for file in files)
    except binascii.Error as error:
        raise ValueError("a prompt's images must be files in base64") from error
    if sum(math.prod(picture_size(image)) for image in images) > MAX_PIXELS:
        raise ValueError("a prompt's images have too many pixels for one request")
    return images


def _prompt(row: Any) -> Prompt:
    if not isinstance(row, Mapping) or not set(row) <= set(_PROMPT_FIELDS):
        raise ValueError(f"a prompt is an object with {', '.join(_PROMPT_FIELDS)}")
    images = _images(row.get("images", []))
    prompt = Prompt(**{"text": "", "index": 0, **row, "images": images})
    texts = (prompt.text, prompt.negative_text, prompt.target or "")
    if not all(isinstance(text, str) for text in texts) or not isinstance(prompt.index, int):
        raise ValueError("a prompt's texts must be strings and its index a whole number")
    if not isinstance(prompt.metadata, Mapping):
        raise ValueError("a prompt's metadata must be an object")
    return prompt


def _column(values: Any, count: int) -> list[float]:
    if not isinstance(values, list) or len(values) != count:
        kind = f"{len(values)} numbers" if isinstance(values, list) else type(values).__name__
        raise ValueError(f"the answer has {kind} for {count} samples")
    if not all(type(value) in (int, float, type(None)) for value in values):
        raise ValueError("the answer holds something else than numbers and null")
    return [math.nan if value is None else float(value) for value in values]
