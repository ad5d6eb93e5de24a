"""The bundled editor against the numbers that its build wrote down."""

from __future__ import annotations

import json

import pytest
from bundled_models.build_tiny_recolour_klein import NAME, evaluate_checkpoint

from flowgrpo_rc import assets
from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.data.prompts import read_prompts


def read(name: str) -> list[Prompt]:
    file = assets.path(f"prompts/recolour_{name}.jsonl")
    return read_prompts(file, require_target=False, most_images=1)


def test_the_bundled_editor_is_as_good_as_its_build_wrote_down() -> None:
    """It can edit, and does not always do as it is told."""
    prompts = read("val")
    folder = assets.path(NAME)
    said = json.loads((folder / "build_metrics.json").read_text())["val"]
    found = evaluate_checkpoint(folder, prompts)
    assert found == pytest.approx(said, abs=0.02)
    assert 0.25 < found["reward"] < 0.75
    assert found["kept"] > 0.8
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 3e6


def test_no_held_out_picture_is_trained_on() -> None:
    train, val = ({prompt.images for prompt in read(name)} for name in ("train", "val"))
    assert (len(train), len(val)) == (96, 32)
    assert train.isdisjoint(val)
