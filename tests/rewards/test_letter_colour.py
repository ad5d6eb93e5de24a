"""The reward for letters of another colour, on flat pictures whose score is known."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.rewards.letter_colour import LetterColour

PAPER = (240, 230, 220)
INK = (0, 0, 200)
WANTED = (200, 0, 0)
LETTERS = (slice(3, 6), slice(2, 9))


def picture(ink: tuple[int, ...], paper: tuple[int, ...] = PAPER) -> np.ndarray:
    pixels = np.full((10, 12, 3), paper, np.uint8)
    pixels[LETTERS] = ink
    return pixels


def prompt(source: np.ndarray, **metadata: object) -> Prompt:
    file = io.BytesIO()
    Image.fromarray(source).save(file, format="PNG")
    return Prompt(text="red, please", index=4, images=(file.getvalue(),), metadata=metadata)


ASKED = prompt(picture(INK), colour=list(WANTED))


@pytest.mark.parametrize(
    ("result", "painted", "unchanged"),
    [
        (picture(WANTED), 1.0, 1.0),
        (picture(INK), 0.0, 1.0),
        (picture((100, 0, 100)), 0.5, 1.0),
        (picture((0, 255, 255)), 0.0, 1.0),  # farther off than the source
        (picture(WANTED, (224, 214, 204)), 1.0, 0.75),  # 16 levels of 64
        (picture(WANTED, (0, 0, 0)), 1.0, 0.0),
    ],
)
def test_scores_of_flat_pictures(result: np.ndarray, painted: float, unchanged: float) -> None:
    scores = LetterColour()(result[None], [ASKED])
    assert scores.parts["painted"] == pytest.approx([painted])
    assert scores.parts["kept"] == pytest.approx([unchanged])
    assert scores.values == pytest.approx([painted * unchanged])


def test_a_source_is_brought_to_the_size_of_the_edit() -> None:
    larger = picture(WANTED).repeat(4, axis=0).repeat(4, axis=1)
    (value,) = LetterColour()(larger[None], [ASKED]).values
    assert 0.8 < value < 1  # the edges of its letters are blurred


def test_a_source_without_letters_has_no_score() -> None:
    empty = prompt(picture(PAPER), colour=[1, 2, 3])
    assert np.isnan(LetterColour()(picture(WANTED)[None], [empty]).values).all()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (prompt(picture(INK)), r"prompt 4 .* has 1 images and colour=None"),
        (Prompt(text="x", index=0, metadata={"colour": [1, 2, 3]}), "has 0 images"),
        (prompt(picture(INK), colour="red"), "colour='red': it needs"),
        (prompt(picture(INK), colour=["1", "2", "3"]), "colour=.*: it needs"),
        (prompt(picture(INK), colour=[256, 0, 0]), "colour=.*, from 0 to 255"),
        (prompt(picture(INK), colour=[float("nan"), 0, 0]), "colour=.*, from 0 to 255"),
    ],
)
def test_what_it_cannot_compare_is_an_error(wrong: Prompt, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LetterColour()(picture(INK)[None], [wrong])
    with pytest.raises(ValueError, match=words):
        LetterColour().check_prompt(wrong)
