"""The bundled CLIP against the numbers that its build wrote down."""

from __future__ import annotations

import json

import pytest
from bundled_models.build_tiny_clip import evaluate_checkpoint

from flowgrpo_rc import assets


def test_the_bundled_clip_is_as_good_as_its_build_wrote_down():
    """Chance would find 1 word in 512, and prefer the right one of two words half of the time."""
    words = [line.strip('"') for line in assets.path("prompts/glyph_val.txt").read_text().split()]
    folder = assets.path("tiny_clip")
    said = json.loads((folder / "build_metrics.json").read_text())["val"]
    found = evaluate_checkpoint(folder, words)
    assert found == pytest.approx(said, abs=0.02)
    assert found["found_among_all"] > 0.2
    assert found["nearer_than_one_changed"] > 0.8
    assert sum(file.stat().st_size for file in folder.iterdir()) < 2e6
