"""How samples travel: JSON, with images as PNG files in base64. No pickle on either side.

A request is {"kind": ..., "samples": [...], "prompts": [...]}: of kind image a PNG each, of kind
video a list of PNGs, of kind text the text. A prompt has the fields of `Prompt`. An answer is
{"values": [...], "parts": {name: [...]}} with one number for each sample, or null for one that
could not be scored.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from io import BytesIO
from numbers import Real
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.rewards.base import Scores, finite_numbers

PATH = "/v1/score"
KINDS = ("image", "video", "text")
MAX_PIXELS = 2**26  # of all the images of a request, 64 of 1024 x 1024
_PROMPT_FIELDS = ("text", "index", "target", "negative_text", "metadata")


def encode(samples: Any, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """The request that asks for scores of images [N, H, W, 3] or videos [N, F, H, W, 3] uint8, or
    texts.
    """
    if not isinstance(samples, np.ndarray):
        kind = "text"
        encoded = list(samples)
    elif samples.ndim == 4:
        kind = "image"
        encoded = [encode_png(image) for image in samples]
    else:
        kind = "video"
        encoded = [[encode_png(frame) for frame in video] for video in samples]
    rows = [{**asdict(prompt), "metadata": dict(prompt.metadata)} for prompt in prompts]
    return {"kind": kind, "samples": encoded, "prompts": rows}


def decode(request: Any) -> tuple[Any, list[Prompt]]:
    """Samples and prompts of a request. ValueError for anything else."""
    if not isinstance(request, Mapping) or set(request) != {"kind", "samples", "prompts"}:
        raise ValueError("a request is an object with kind, samples and prompts")
    kind = request["kind"]
    samples = request["samples"]
    prompts = request["prompts"]
    if kind not in KINDS or not isinstance(samples, list) or not isinstance(prompts, list):
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, samples and prompts lists")
    if not samples or len(samples) != len(prompts):
        raise ValueError(f"{len(samples)} samples but {len(prompts)} prompts; at least one of each")
    return _decoded(kind, samples), [_prompt(row) for row in prompts]


def encode_scores(scores: Scores) -> dict[str, Any]:
    def column(values: Sequence[float]) -> list[float | None]:
        return [None if math.isnan(value) else value for value in finite_numbers(values)]

    return {
        "values": column(scores.values),
        "parts": {name: column(part) for name, part in scores.parts.items()},
    }


def decode_scores(answer: Any, part_names: Sequence[str], count: int) -> Scores:
    """The scores of `count` samples, NaN for null. ValueError for an answer that is none; other
    parts are left out.
    """
    if not isinstance(answer, Mapping) or not isinstance(answer.get("parts", {}), Mapping):
        raise ValueError("the answer is no object with values and parts")
    parts = answer.get("parts", {})
    missing = [name for name in part_names if name not in parts]
    if missing:
        raise ValueError(f"the answer lacks the part {missing[0]!r}")
    return Scores(
        values=_column(answer.get("values"), count),
        parts={name: _column(parts[name], count) for name in part_names},
    )


def encode_png(image: np.ndarray) -> str:
    """image [H, W, 3] uint8 as a PNG file in base64."""
    file = BytesIO()
    Image.fromarray(image).save(file, format="PNG", compress_level=1)
    return base64.b64encode(file.getvalue()).decode("ascii")


def decode_png(text: Any, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """The image [H, W, 3] uint8. ValueError for what is no PNG file in base64, or has more
    pixels.
    """
    if not isinstance(text, str):
        raise ValueError("an image must be a PNG file in base64")
    try:
        with Image.open(BytesIO(base64.b64decode(text, validate=True)), formats=["PNG"]) as image:
            if image.width * image.height > max_pixels:
                raise ValueError(
                    f"{image.width} x {image.height} pixels are too many for one request"
                )
            return np.asarray(image.convert("RGB"))
    except (
        binascii.Error,
        UnidentifiedImageError,
        OSError,
        SyntaxError,
        Image.DecompressionBombError,
    ) as error:
        raise ValueError(
            f"an image must be a PNG file in base64 ({type(error).__name__})"
        ) from error


def _decoded(kind: str, samples: list[Any]) -> Any:
    if kind == "text":
        if not all(isinstance(sample, str) for sample in samples):
            raise ValueError("texts must be strings")
        return samples
    if kind == "image":
        return _stack(samples)
    if not all(
        isinstance(sample, list) and len(sample) == len(samples[0]) > 0 for sample in samples
    ):
        raise ValueError("videos must be lists of images, all of one length")
    frames = _stack([frame for sample in samples for frame in sample])
    return frames.reshape(len(samples), -1, *frames.shape[1:])


def _stack(encoded: list[Any]) -> np.ndarray:
    images = []
    left = MAX_PIXELS
    for text in encoded:
        images.append(decode_png(text, left))
        left -= images[-1].shape[0] * images[-1].shape[1]
    if len({image.shape for image in images}) > 1:
        raise ValueError("all images of a request must have one size")
    return np.stack(images)


def _prompt(row: Any) -> Prompt:
    if not isinstance(row, Mapping) or not set(row) <= set(_PROMPT_FIELDS):
        raise ValueError(f"a prompt is an object with {', '.join(_PROMPT_FIELDS)}")
    prompt = Prompt(**{"text": "", "index": 0, **row})
    texts = (prompt.text, prompt.negative_text, prompt.target or "")
    if not all(isinstance(text, str) for text in texts) or not isinstance(prompt.index, int):
        raise ValueError("a prompt's texts must be strings and its index a whole number")
    if not isinstance(prompt.metadata, Mapping):
        raise ValueError("a prompt's metadata must be an object")
    return prompt


def _column(values: Any, count: int) -> list[float]:
    if not isinstance(values, list) or len(values) != count:
        found = f"{len(values)} numbers" if isinstance(values, list) else type(values).__name__
        raise ValueError(f"the answer has {found} for {count} samples")
    if not all(
        value is None or (isinstance(value, Real) and not isinstance(value, bool))
        for value in values
    ):
        raise ValueError("the answer holds something else than numbers and null")
    return [math.nan if value is None else float(value) for value in values]
