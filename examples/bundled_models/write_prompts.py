"""Writes the bundled prompts of real models.

    PYTHONPATH=examples python -m bundled_models.write_prompts [--out DIR]

`signs_train.txt` and `signs_val.txt` ask for pictures with a text in them, `objects.jsonl` for
objects in number, colour and place, `scenes.jsonl` for scenes of several kinds. Everything follows
from the words of `prompt_words`: the order is that of a hash, and no number is drawn.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Mapping, Sequence
from itertools import permutations, product
from pathlib import Path
from typing import Any

from bundled_models.prompt_words import (
    COLORS,
    COUNTS,
    DETAILS,
    OBJECTS,
    SCENE_WORDS,
    SCENES,
    SIDES,
    SIGNS,
    TEXTS,
    Pattern,
)
from flowgrpo_rc.assets import ROOT

NUM_TRAIN = 1000
NUM_VAL = 200
PER_CATEGORY = 24  # prompts of objects.jsonl
PER_KIND = 16  # prompts of scenes.jsonl

Row = Mapping[str, Any]


def write(folder: Path) -> None:
    """Writes the four files.

    Args:
      folder: where to; made if it is not there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    signs = sign_prompts()
    for name, lines in (("train", signs[:NUM_TRAIN]), ("val", signs[NUM_TRAIN:])):
        (folder / f"signs_{name}.txt").write_text("".join(f"{line}\n" for line in lines))
    for name, rows in (("objects", object_prompts()), ("scenes", scene_prompts())):
        lines = [f"{json.dumps(row)}\n" for row in rows]
        (folder / f"{name}.jsonl").write_text("".join(lines))


def sign_prompts() -> list[str]:
    """Returns prompts with a text in double quotes: no text and no prompt comes twice.

    Returns:
      NUM_TRAIN + NUM_VAL prompts.
    """
    texts = {kind: _shuffled(_filled(patterns)) for kind, patterns in TEXTS.items()}
    every = [(kind, text) for kind, found in texts.items() for text in found]
    chosen = _shuffled(every)[: NUM_TRAIN + NUM_VAL]
    places = dict.fromkeys(TEXTS, 0)
    prompts = []
    for kind, text in chosen:
        place = places[kind]
        places[kind] += 1
        sign = SIGNS[kind][place % len(SIGNS[kind])]
        # The number of details is a prime, so that a sign meets each of them.
        detail = DETAILS[place % len(DETAILS)]
        prompts.append(sign.format(f'"{_cased(text)}"') + detail)
    return prompts


def object_prompts() -> list[Row]:
    """Returns prompts in the form of GenEval's, with what a detector should find in each picture.

    Returns:
      PER_CATEGORY prompts of each of six categories, one category after the other in turn.
    """
    categories = {
        "single_object": [_wanted(f"a photo of {_a(name)}", (name, 1)) for name in OBJECTS],
        "two_object": [
            _wanted(f"a photo of {_a(one)} and {_a(other)}", (one, 1), (other, 1))
            for one, other in permutations(OBJECTS, 2)
        ],
        "counting": [_counted(name, count) for name, count in product(OBJECTS, COUNTS)],
        "colors": [
            _wanted(f"a photo of {_a(f'{color} {name}')}", (name, 1, {"color": color}))
            for name, color in product(OBJECTS, COLORS)
            if name != color
        ],
        "position": [
            _wanted(
                f"a photo of {_a(one)} {side} {_a(other)}",
                (other, 1),
                (one, 1, {"position": [side, 0]}),
            )
            for (one, other), side in product(permutations(OBJECTS, 2), SIDES)
        ],
        "color_attr": [
            _wanted(
                f"a photo of {_a(f'{red} {one}')} and {_a(f'{blue} {other}')}",
                (one, 1, {"color": red}),
                (other, 1, {"color": blue}),
            )
            for (one, other), (red, blue) in product(
                permutations(OBJECTS, 2), permutations(COLORS, 2)
            )
        ],
    }
    return _in_turn("tag", categories, PER_CATEGORY)


def scene_prompts() -> list[Row]:
    """Returns prompts of the kinds in which DrawBench asks, in sentences of this project.

    Returns:
      PER_KIND prompts of each kind, one kind after the other in turn.
    """
    kinds = {
        kind: [{"prompt": text} for text in _filled(patterns, SCENE_WORDS)]
        for kind, patterns in SCENES.items()
    }
    return _in_turn("category", kinds, PER_KIND)


def _in_turn(key: str, groups: Mapping[str, Sequence[Row]], count: int) -> list[Row]:
    chosen = {name: _shuffled(rows)[:count] for name, rows in groups.items()}
    return [{key: name, **rows[i]} for i in range(count) for name, rows in chosen.items()]


def _wanted(prompt: str, *objects: tuple[Any, ...]) -> Row:
    """Returns a prompt with what it asks for: class, count and perhaps further properties."""
    include = [
        {"class": name, "count": count, **(more[0] if more else {})}
        for name, count, *more in objects
    ]
    return {"include": include, "prompt": prompt}


def _counted(name: str, count: int) -> Row:
    row = _wanted(f"a photo of {COUNTS[count]} {OBJECTS[name]}", (name, count))
    return {**row, "exclude": [{"class": name, "count": count + 1}]}


def _filled(
    patterns: Sequence[Pattern],
    words: Mapping[str, Sequence[Any]] | None = None,
) -> list[str]:
    """Returns every pattern with every choice of its words; each text once."""
    texts: dict[str, None] = {}
    for pattern in patterns:
        text, own = (pattern, words or {}) if isinstance(pattern, str) else pattern
        names = [name for name in own if f"{{{name}}}" in text]
        for choice in product(*(own[name] for name in names)):
            texts[text.format(**dict(zip(names, choice, strict=True)))] = None
    return list(texts)


def _cased(text: str) -> str:
    """Writes one text in four in capitals."""
    return text.upper() if _hash(text)[0] in "0123" else text


def _a(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def _shuffled(rows: Sequence[Any]) -> list[Any]:
    return sorted(rows, key=lambda row: _hash(str(row)))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "prompts", help="folder to write to")
    write(parser.parse_args().out)
