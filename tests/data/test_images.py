"""Condition images of prompt files: the ways to name them, and what is wrong with them."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet

from flowgrpo_rc.data.prompts import places_of, read_prompts
from flowgrpo_rc.pictures import read_picture


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of data with two pictures, 8 x 6 and 3 x 2."""
    for name, size in (("a.png", (8, 6)), ("b.png", (3, 2))):
        (tmp_path / "data").mkdir(exist_ok=True)
        Image.new("RGB", size, "red").save(tmp_path / "data" / name)
    return tmp_path / "data"


def read(folder: Path, *rows: object, most: int = 2) -> list[tuple[object, ...]]:
    file = folder / "train.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows))
    prompts = read_prompts(file, require_target=False, most_images=most)
    return [prompt.images for prompt in prompts]


def test_paths_stand_relative_to_the_file_and_are_no_metadata(folder: Path) -> None:
    a, b = str(folder / "a.png"), str(folder / "b.png")
    rows = [
        {"prompt": "x", "image": "a.png"},
        {"prompt": "x", "images": ["b.png", a]},
        {"prompt": "x", "image": {"path": "b.png", "bytes": None}, "level": 3},
    ]
    assert read(folder, *rows) == [(a,), (b, a), (b,)]
    (prompt,) = read_prompts([folder], require_target=False, most_images=2)[2:]
    assert prompt.metadata == {"level": 3}


def test_files_may_hold_the_pictures_themselves(folder: Path) -> None:
    content = (folder / "b.png").read_bytes()
    row = {"prompt": "x", "image": {"base64": base64.b64encode(content).decode()}}
    assert read(folder, row) == [(content,)]
    rows = [
        {"prompt": "x", "images": [{"bytes": content, "path": "elsewhere.png"}]},
        {"prompt": "x", "images": [{"bytes": None, "path": "a.png"}]},
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "train.parquet")
    first, second = read_prompts(folder / "train.parquet", require_target=False, most_images=1)
    assert first.images == (content,)
    assert np.array_equal(read_picture(first.images[0]), np.full((2, 3, 3), [255, 0, 0]))
    assert second.images == (str(folder / "a.png"),)


def float_picture() -> str:
    file = io.BytesIO()
    Image.new("F", (3, 2), 0.5).save(file, "TIFF")
    return base64.b64encode(file.getvalue()).decode()


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"image": "c.png"}, "there is no file .*c.png"),
        ({"image": "train.jsonl"}, "cannot be read as a picture"),
        ({"image": "a.png", "images": ["b.png"]}, "has both image and images"),
        ({}, "has no image, and rollout.pipeline.condition_images=2"),
        ({"images": []}, "has no image"),
        ({"images": ["a.png"] * 3}, "has 3 images, and rollout.pipeline.condition_images=2"),
        ({"image": 7}, "must be a path, or an object with its path, bytes or base64, got 7"),
        ({"image": ""}, "must be a path"),
        ({"image": "https://example.org/a.png"}, "must be a path, .* got 'https"),
        ({"image": "data:image/png;base64," + "A" * 9999}, "must be a path, .* got 'data:.{,200}$"),
        ({"image": "A" * 9999}, "must be a path, .* got 'A{,200}$"),
        ({"image": {"bytes": None, "path": None}}, "must be a path"),
        ({"image": {"base64": "abc"}}, "the base64 of an image cannot be read: Incorrect padding"),
        ({"image": {"base64": "abcd"}}, "an image of 3 bytes cannot be read as a picture"),
        ({"image": {"base64": float_picture()}}, "its mode is F, which does not say what is white"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(
    folder: Path, row: dict[str, object], words: str
) -> None:
    with pytest.raises(ValueError, match=rf"train.jsonl, line 2: .*{words}"):
        read(folder, {"prompt": "x", "image": "a.png"}, {"prompt": "x"} | row)


def test_a_picture_has_a_largest_size(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"prompt": "x", "image": "a.png"}
    monkeypatch.setattr("flowgrpo_rc.data.images.MAX_PIXELS", 48)
    assert len(read(folder, row)) == 1
    monkeypatch.setattr("flowgrpo_rc.data.images.MAX_PIXELS", 47)
    with pytest.raises(ValueError, match=r"a\.png has 8 x 6 pixels, more than 47: make it smaller"):
        read(folder, row)


def test_an_image_for_a_model_that_is_given_none_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"line 1: has 1 image, and .*condition_images=0"):
        read(folder, {"prompt": "x", "image": "a.png"}, most=0)
    assert read(folder, {"prompt": "x", "images": []}, most=0) == [()]


def test_the_place_of_a_prompt_counts_through_all_files(tmp_path: Path) -> None:
    for name, text in (("a.txt", "x\ny"), ("b.txt", "z")):
        (tmp_path / name).write_text(text)
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    key = "data.train_files"
    assert places_of(files, key)[1:] == [f"{key}: {files[0]}, line 2", f"{key}: {files[1]}, line 1"]
