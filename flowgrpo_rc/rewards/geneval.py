"""A reward for images that show the objects of their prompt, in number, colour and place.

Reference: GenEval, https://arxiv.org/abs/2310.11513. Its detector runs in an environment of its
own, behind HTTP; the scores are computed here. The request is

    POST `url`/v1/detect   {"images": [PNG in base64, ...]}

and its answer holds the objects of each image, the most certain first; a colour is optional:

    {"objects": [[{"class": "dog", "box": [left, top, right, bottom], "color": "brown"}, ...], ...]}
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.plugins import build
from flowgrpo_rc.rewards.base import Reward, Scores, batches, check_range, prompt_name
from flowgrpo_rc.rewards.http.client import JsonClient
from flowgrpo_rc.rewards.http.wire import encode_png

PATH = "/v1/detect"
NEAR = 0.1  # an offset below this fraction of the summed widths (or heights) counts as none
POSITIONS = ("left of", "right of", "above", "below")


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """An object that the detector found in an image."""

    name: str  # its class
    box: tuple[float, float, float, float]  # left, top, right, bottom in pixels; y grows downwards
    color: str | None = None  # None if the detector names none


class GenEval(Reward):
    """The mean, over all that the prompt asks for, of how far each wish is met, from 0 to 1.

    The part `strict` is 1 if every wish is met completely. The wishes are read from two fields of
    GenEval's own prompt files, which may hold them as JSON text:

    * `include`, a list of {class, count, color, position: [side, index of another entry]}. n
      objects out of `count` meet it by n / count. With a colour or a position this is one half of
      the score; the other half is the fraction of objects with that colour or place.
    * `exclude`, a list of {class, count}: fewer than `count` objects of the class. Each one too
      many costs 1 / (count - 1).

    Args:
      url: address of the detector.
      batch_size: images in one request.
      connection: the other options of `JsonClient`. Its deadline is for one chunk of samples.
    """

    part_names = ("strict",)

    def __init__(self, *, url: str, batch_size: int = 16, **connection: object) -> None:
        check_range(1, batch_size=batch_size)
        self._batch_size = batch_size
        self._client = build(JsonClient, {"url": url, **connection}, "connection")

    def check_prompt(self, prompt: Prompt) -> None:
        """Raises ValueError if the wishes of the prompt cannot be read."""
        _wishes(prompt)

    def __call__(self, samples: np.ndarray, prompts: Sequence[Prompt]) -> Scores:
        wishes = [_wishes(prompt) for prompt in prompts]
        pngs = [encode_png(image) for image in samples]
        chunks = [pngs[rows] for rows in batches(len(pngs), self._batch_size)]
        answers = self._client.post_each(PATH, [{"images": chunk} for chunk in chunks])
        objects_of: list[list[Found]] = []
        for answer, chunk in zip(answers, chunks, strict=True):
            objects_of += _objects(answer, len(chunk))
        met = [
            [degree(wish, include, objects) for wish in (*include, *exclude)]
            for (include, exclude), objects in zip(wishes, objects_of, strict=True)
        ]
        return Scores(
            values=[sum(degrees) / len(degrees) for degrees in met],
            parts={"strict": [float(min(degrees) >= 1) for degrees in met]},
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
    """A wish of a prompt: at least `count` objects of a class, or fewer than `count`."""

    name: str
    count: int
    color: str | None = None  # that each must have
    position: tuple[str, int] | None = None  # side, and index of an entry of `include`
    excluded: bool = False  # fewer than `count` are wished


def degree(wish: Wish, include: Sequence[Wish], objects: Sequence[Found]) -> float:
    """Computes how far a wish is met, from 0 to 1, by the objects of an image.

    `include` holds the wishes that a position may refer to; the most certain objects come first.
    """
    matching = [box for box in objects if box.name == wish.name]
    if wish.excluded:
        allowed = wish.count - 1
        surplus = len(matching) - allowed
        if surplus <= 0 or not allowed:
            return float(surplus <= 0)
        return max(0.0, 1 - surplus / allowed)
    matching = matching[: wish.count]
    share = len(matching) / wish.count
    properties = []
    if wish.color is not None:
        properties.append(sum(box.color == wish.color for box in matching) / wish.count)
    if wish.position is not None:
        side, index = wish.position
        named = [box for box in objects if box.name == include[index].name]
        references = named[: include[index].count]
        placed = [
            all(side in sides(box, reference) for reference in references) for box in matching
        ]
        properties.append(sum(placed) / wish.count if references else 0.0)
    if not properties:
        return share
    return (share + sum(properties) / len(properties)) / 2


def sides(first: Found, second: Found) -> set[str]:
    """Returns the sides of `second` on which `first` is, by GenEval's rule; none if too near."""
    left, top, right, bottom = first.box
    left_2, top_2, right_2, bottom_2 = second.box
    x = (left + right) / 2 - (left_2 + right_2) / 2
    y = (top + bottom) / 2 - (top_2 + bottom_2) / 2
    distance = math.hypot(x, y)
    if not distance:
        return set()
    x = _beyond(x, NEAR * (right - left + (right_2 - left_2)))
    y = _beyond(y, NEAR * (bottom - top + (bottom_2 - top_2)))
    # In the order of POSITIONS; y grows downwards.
    holds_by_side = (
        x / distance < -0.5,
        x / distance > 0.5,
        y / distance < -0.5,
        y / distance > 0.5,
    )
    return {side for side, holds in zip(POSITIONS, holds_by_side, strict=True) if holds}


def _beyond(offset: float, margin: float) -> float:
    """Returns by how much an offset exceeds a margin, with its sign; 0 within the margin."""
    if abs(offset) <= margin:
        return 0.0
    return offset - math.copysign(margin, offset)


def _wishes(prompt: Prompt) -> tuple[list[Wish], list[Wish]]:
    """Reads `include` and `exclude`. ValueError if a prompt lacks them or holds something else."""
    where = prompt_name(prompt)
    rows = _unpacked(prompt.metadata.get("include"))
    unwanted = _unpacked(prompt.metadata.get("exclude")) or []
    if not isinstance(rows, list) or not rows or not isinstance(unwanted, list):
        raise ValueError(
            f"{where}: include must be a list of objects, and exclude one or nothing, as they are "
            f"or as JSON; got {rows!r:.100} and {unwanted!r:.100}"
        )
    include = [_wish(row, where, excluded=False) for row in rows]
    for place, wish in enumerate(include):
        side, index = wish.position or (POSITIONS[0], None)
        if side not in POSITIONS or index not in {None, *range(len(include))} - {place}:
            sides = ", ".join(POSITIONS)
            raise ValueError(
                f"{where}: position {wish.position}: give one of {sides}, and another entry's index"
            )
    return include, [_wish(row, where, excluded=True) for row in unwanted]


def _unpacked(value: object) -> object:
    """Returns what a text holds as JSON, since columns of parquet hold no mixed lists."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def _wish(row: object, where: str, *, excluded: bool) -> Wish:
    row = _unpacked(row)
    if isinstance(row, Mapping):
        values = {name: value for name, value in row.items() if value is not None}
        row = {"color": None, **values, "position": _unpacked(values.get("position"))}
    match row:
        case {
            "class": str(name),
            "count": int(count),
            "color": str() | None as color,
            "position": [str(), int()] | None as place,
            **further,
        } if count > 0 and not further and not (excluded and (color or place)):
            position = None if place is None else (place[0], place[1])
            return Wish(name=name, count=count, color=color, position=position, excluded=excluded)
    raise ValueError(
        f"{where}: {row!r} must be an object with class and count, and perhaps color and position "
        "[side, index]; in exclude with class and count alone"
    )


def _objects(answer: object, count: int) -> list[list[Found]]:
    """Returns the objects of each of `count` images. ValueError for an answer that is none."""
    match answer:
        case {"objects": [*images]} if len(images) == count:
            return [[_found(row) for row in rows] for rows in images]
    raise ValueError(f"the answer has no objects of {count} images")


def _found(row: object) -> Found:
    match row:
        case {"class": str(name), "box": [_, _, _, _] as box, **further} if all(
            type(side) in (int, float) for side in box
        ):
            color = further.get("color")
            return Found(name=name, box=tuple(box), color=color if isinstance(color, str) else None)
    raise ValueError("an object of the answer has no class or no box of four numbers")
