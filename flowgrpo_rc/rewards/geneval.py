"""Whether the objects that a prompt asks for are there: how many, in which colour, on which side of
each other.

Reference: GenEval, https://arxiv.org/abs/2310.11513. Its detector lives in an environment of its
own, behind HTTP; what its findings are worth is decided here. POST {"images": [PNG in base64, ...]}
to `url`/v1/detect is answered by {"objects": [[{"class": "dog", "box": [left, top, right, bottom],
"color": "brown"}, ...], ...]}, the objects of each image with the surest first; a colour is
optional.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import hypot
from typing import Any

import numpy as np

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.plugins import build
from flowgrpo_rc.rewards.base import Reward, Scores
from flowgrpo_rc.rewards.http.client import JsonClient, ServerError
from flowgrpo_rc.rewards.http.wire import encode_png

PATH = "/v1/detect"
NEAR = 0.1  # of the summed widths or heights: an offset below that is none
POSITIONS = ("left of", "right of", "above", "below")


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """An object in an image; box: left, top, right, bottom, y downwards."""

    name: str
    box: tuple[float, float, float, float]
    color: str | None = None


class GenEval(Reward):
    """The mean over what the prompt asks for, of how far it is met; the part `strict` is 1 where
    all of it is.

    What it asks for stands in the fields of GenEval's own prompt files: `include`, a list of
    {class, count, color,
    position: [side, index of another entry]}, and `exclude`, a list of {class, count}: fewer than
    `count` of them. An entry of n objects out of `count` is met by n / count; with a colour or a
    position, that is one half, and the fraction of the objects that have the colour or the place is
    the other. Each object too many costs 1 / (count - 1).

    url, and token_env, ca_file, deadline_s, max_attempts, max_pause_s, max_response_mb,
        max_failures, cooldown_s: as in `JsonClient`. deadline_s is of all requests for one chunk of
        samples.
    batch_size: images of a request.

    Raises ValueError as `JsonClient` does and for a batch_size below 1; when called, ValueError for
    a prompt that asks for nothing, and ServerError.
    """

    part_names = ("strict",)

    def __init__(self, *, url: str, batch_size: int = 16, **connection: Any) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size!r} must be at least 1")
        self._batch_size = batch_size
        self._client = build(JsonClient, {"url": url, **connection}, "connection")

    def __call__(self, samples: np.ndarray, prompts: Sequence[Prompt]) -> Scores:
        wanted = [_wishes(prompt) for prompt in prompts]
        pngs = [encode_png(image) for image in samples]
        chunks = [
            pngs[start : start + self._batch_size]
            for start in range(0, len(pngs), self._batch_size)
        ]
        found: list[list[Found]] = []
        for answer, chunk in zip(
            self._client.post_all(PATH, [{"images": chunk} for chunk in chunks]),
            chunks,
            strict=True,
        ):
            if isinstance(answer, ServerError):
                raise answer
            found += _objects(answer, len(chunk))
        met = [
            [degree(wish, include, objects) for wish in (*include, *exclude)]
            for (include, exclude), objects in zip(wanted, found, strict=True)
        ]
        return Scores(
            values=[sum(degrees) / len(degrees) for degrees in met],
            parts={"strict": [float(min(degrees) >= 1) for degrees in met]},
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
    """At least `count` objects with these properties or, if they are to be `excluded`, fewer than
    `count`.
    """

    name: str
    count: int
    color: str | None = None
    position: tuple[str, int] | None = None
    excluded: bool = False


def degree(wish: Wish, include: Sequence[Wish], objects: Sequence[Found]) -> float:
    """How far a wish is met, from 0 to 1."""
    own = [found for found in objects if found.name == wish.name]
    if wish.excluded:
        surplus = len(own) - (wish.count - 1)
        return (
            1.0
            if surplus <= 0
            else max(0.0, 1 - surplus / (wish.count - 1))
            if wish.count > 1
            else 0.0
        )
    own = own[: wish.count]
    there = len(own) / wish.count
    properties = []
    if wish.color is not None:
        properties.append(sum(found.color == wish.color for found in own) / wish.count)
    if wish.position is not None:
        side, index = wish.position
        others = [found for found in objects if found.name == include[index].name][
            : include[index].count
        ]
        placed = [
            bool(others) and all(side in sides(found, other) for other in others) for found in own
        ]
        properties.append(sum(placed) / wish.count)
    return there if not properties else (there + sum(properties) / len(properties)) / 2


def sides(one: Found, other: Found) -> set[str]:
    """On which sides of the other object the first one is, as GenEval has it; none where they are
    too near.
    """
    (x, width), (y, height) = (
        (_middle(one, axis) - _middle(other, axis), _size(one, axis) + _size(other, axis))
        for axis in (0, 1)
    )
    distance = hypot(x, y)
    x, y = (
        0.0 if abs(offset) <= NEAR * size else offset - NEAR * size * (1 if offset > 0 else -1)
        for offset, size in ((x, width), (y, height))
    )
    if not distance:
        return set()
    found = (x / distance < -0.5, x / distance > 0.5, y / distance < -0.5, y / distance > 0.5)
    return {side for side, holds in zip(POSITIONS, found, strict=True) if holds}


def _middle(found: Found, axis: int) -> float:
    return (found.box[axis] + found.box[axis + 2]) / 2


def _size(found: Found, axis: int) -> float:
    return found.box[axis + 2] - found.box[axis]


def _wishes(prompt: Prompt) -> tuple[list[Wish], list[Wish]]:
    """What stands in `include` and `exclude`. ValueError for a prompt without, or with something
    else there.
    """
    where = f"prompt {prompt.index} ({prompt.text!r})"
    match prompt.metadata.get("include"):
        case [_, *_] as rows:
            include = [_wish(row, where, excluded=False) for row in rows]
        case _:
            raise ValueError(
                f"{where} has no field include with the objects that geneval looks for"
            )
    unwanted = prompt.metadata.get("exclude") or []
    if not isinstance(unwanted, list):
        raise ValueError(f"{where}: exclude must be a list")
    wishes = include, [_wish(row, where, excluded=True) for row in unwanted]
    for wish in include:
        if wish.position is not None and not (
            wish.position[0] in POSITIONS and 0 <= wish.position[1] < len(include)
        ):
            raise ValueError(
                f"{where}: position {list(wish.position)}: give one of {', '.join(POSITIONS)} and "
                "an index"
            )
    return wishes


def _wish(row: Any, where: str, *, excluded: bool) -> Wish:
    match {"color": None, "position": None, **row} if isinstance(row, Mapping) else row:
        case {
            "class": str(name),
            "count": int(count),
            "color": str() | None as color,
            "position": [str(), int()] | None as place,
        } if count > 0:
            position = None if place is None else (place[0], place[1])
            return Wish(name=name, count=count, color=color, position=position, excluded=excluded)
    raise ValueError(
        f"{where}: {row!r} must be an object with class and count, and perhaps color and position "
        "[side, index]"
    )


def _objects(answer: Any, count: int) -> list[list[Found]]:
    """The objects of each of `count` images. ValueError for an answer that is none."""
    if not isinstance(answer, Mapping) or not isinstance(answer.get("objects"), list):
        raise ValueError("the answer is no object with objects")
    if len(answer["objects"]) != count:
        raise ValueError(f"the answer has objects of {len(answer['objects'])} images for {count}")
    return [[_found(row) for row in rows] for rows in answer["objects"]]


def _found(row: Any) -> Found:
    match row:
        case {
            "class": str(name),
            "box": [int() | float(), int() | float(), int() | float(), int() | float()] as box,
        }:
            color = row.get("color")
            return Found(name=name, box=tuple(box), color=color if isinstance(color, str) else None)
    raise ValueError("an object of the answer has no class or no box of four numbers")
