"""The GenEval reward: sides and wishes by hand, prompts and answers that are refused."""

from __future__ import annotations

import json

import pytest
from support.prompts import random_images
from support.reward_servers import answering, scripted

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.rewards.geneval import Found, GenEval, Wish, degree, sides


def dog(left: float, top: float, color: str | None = None, name: str = "dog") -> Found:
    return Found(name=name, box=(left, top, left + 10, top + 10), color=color)


@pytest.mark.parametrize(
    ("first", "second", "where"),
    [
        (dog(0, 0), dog(50, 0), {"left of"}),
        (dog(50, 0), dog(0, 0), {"right of"}),
        (dog(0, 0), dog(0, 50), {"above"}),
        (dog(0, 50), dog(0, 0), {"below"}),
        (dog(0, 0), dog(50, 50), {"left of", "above"}),
        (dog(0, 0), dog(0, 0), set()),
        (dog(0, 0), dog(2, 0), set()),  # as near as a tenth of both widths
        (dog(0, 0), dog(3, 0), set()),  # (3 - 2) / 3 is no half
        (dog(0, 0), dog(5, 0), {"left of"}),  # (5 - 2) / 5 is
    ],
)
def test_sides(first, second, where):
    assert sides(first, second) == where


TWO = Wish(name="dog", count=2)
CAT = Wish(name="cat", count=1)
LEFT = Wish(name="dog", count=1, position=("left of", 0))
FEWER = Wish(name="dog", count=3, excluded=True)


@pytest.mark.parametrize(
    ("wish", "objects", "met"),
    [
        (TWO, [], 0.0),
        (TWO, [dog(0, 0)], 0.5),
        (TWO, [dog(0, 0)] * 3, 1.0),
        (FEWER, [dog(0, 0)] * 2, 1.0),
        (FEWER, [dog(0, 0)] * 3, 0.5),
        (FEWER, [dog(0, 0)] * 9, 0.0),
        (Wish(name="dog", count=1, excluded=True), [dog(0, 0)], 0.0),
        (Wish(name="dog", count=1, excluded=True), [dog(0, 0, name="cat")], 1.0),
        (Wish(name="dog", count=2, color="red"), [dog(0, 0, "red"), dog(0, 0, "blue")], 0.75),
        (Wish(name="dog", count=1, color="red"), [dog(0, 0, "red")], 1.0),
        (Wish(name="dog", count=1, color="red"), [dog(0, 0)], 0.5),
        (LEFT, [dog(0, 0), dog(50, 0, name="cat")], 1.0),
        (LEFT, [dog(99, 0), dog(50, 0, name="cat")], 0.5),
        (LEFT, [dog(0, 0)], 0.5),
    ],
)
def test_how_far_a_wish_is_met(wish, objects, met):
    assert degree(wish, [CAT], objects) == pytest.approx(met)


DOG = {"class": "dog", "count": 1}


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, r"prompt 4 \('x'\): include must be a list"),
        ({"include": "a dog"}, "include must be a list .* or as JSON; got 'a dog'"),
        ({"include": "[" * 99_999}, "include must be a list .*got"),
        ({"include": [{"class": "dog"}]}, "must be an object with class and count"),
        ({"include": [DOG | {"count": 0}]}, "must be an object with class and count"),
        ({"include": [DOG | {"position": ["near", 0]}]}, "position .*: give one of left of"),
        ({"include": [DOG | {"position": ["above", 0]}]}, "position .*, and another entry's index"),
        ({"include": [DOG | {"colour": "red"}]}, r"'colour': 'red'.* and position \["),
        (
            {"include": [DOG], "exclude": [DOG | {"color": "red"}]},
            "in exclude with class and count",
        ),
        ({"include": [DOG | {"position": "above"}]}, r"perhaps color and position \["),
        ({"include": [DOG | {"color": 3}]}, r"perhaps color and position \["),
        ({"include": ["dog"]}, r"perhaps color and position \["),
        ({"include": [DOG], "exclude": 3}, "include must be a list of objects, and exclude one"),
    ],
)
def test_geneval_asks_no_server_about_a_prompt_that_it_cannot_judge(metadata, message):
    prompt = Prompt(text="x", index=4, metadata=metadata)
    with pytest.raises(ValueError, match=message):
        GenEval(url="http://127.0.0.1:1")(random_images(1), [prompt])
    with pytest.raises(ValueError, match=message):
        GenEval(url="http://127.0.0.1:1").check_prompt(prompt)


CAT_LEFT = {"class": "cat", "count": 1, "position": ["left of", 0]}
WISHES = {"include": [DOG, CAT_LEFT], "exclude": [{"class": "cat", "count": 2}]}
WRITTEN = {
    "whole": {name: json.dumps(rows) for name, rows in WISHES.items()},
    "entries": WISHES | {"include": [json.dumps(row) for row in WISHES["include"]]},
    "position": WISHES | {"include": [DOG, CAT_LEFT | {"position": '["left of", 0]'}]},
}


@pytest.mark.parametrize("metadata", WRITTEN.values(), ids=WRITTEN)
def test_wishes_may_be_written_as_json(metadata):
    """Columns of parquet hold no list of a text and a number."""
    prompt = Prompt(text="x", index=4, metadata=metadata)
    objects = [{"class": "cat", "box": [0, 0, 10, 10]}, {"class": "dog", "box": [50, 0, 60, 10]}]
    with scripted(answering(lambda _: {"objects": [objects]})) as server:
        reward = GenEval(url=server.url)
        reward.check_prompt(prompt)
        scores = reward(random_images(1), [prompt])
    assert scores.values == [1.0]
    assert scores.parts["strict"] == [1.0]


@pytest.mark.parametrize(
    "answer",
    [
        [],
        {},
        {"objects": []},
        {"objects": [[{"class": "dog"}]]},
        {"objects": [[{"class": "dog", "box": [1, 2, 3, "4"]}]]},
    ],
)
def test_geneval_refuses_what_is_no_detection(answer):
    prompt = Prompt(text="x", index=4, metadata={"include": [DOG]})
    with (
        scripted(answering(lambda _: answer)) as server,
        pytest.raises(ValueError, match=r"the answer|of the answer"),
    ):
        GenEval(url=server.url)(random_images(1), [prompt])
