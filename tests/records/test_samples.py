"""Grids of samples."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.records.samples import image_grid, read_grid, save_grid, with_sources


def test_grid_enlarges_small_images_by_whole_pixels_and_reduces_large_ones() -> None:
    image = np.zeros((1, 32, 32, 3), np.uint8)
    image[0, 0, 0] = (255, 0, 0)
    red = np.argwhere((np.asarray(image_grid(image, ["x"])) == (255, 0, 0)).all(-1))
    assert len(red) == 16
    assert (red.max(0) - red.min(0) == 3).all()
    grid = image_grid(np.zeros((9, 512, 1024, 3), np.uint8), ["a long caption " * 30] * 9)
    black = (np.asarray(grid) == 0).all(-1)
    assert black.sum() == 9 * 128 * 256
    assert grid.width < 8 * 256 + 100


def test_grid_shows_captions() -> None:
    images = np.full((2, 64, 64, 3), 255, np.uint8)
    blank, written = (
        np.asarray(image_grid(images, ["", caption])) for caption in ("", 'sign "AB1"')
    )
    changed = np.argwhere((blank != written).any(-1))
    assert len(changed)
    assert changed[:, 1].min() > blank.shape[1] / 2
    assert changed[:, 0].min() > 128


def test_a_saved_grid_gives_its_samples_back(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 255, (10, 64, 128, 3), dtype=np.uint8)
    captions = [f"a \u201csign\u201d {i} 0.{i}0" for i in range(10)]
    save_grid(tmp_path / "grid.png", images, captions)
    tiles = read_grid(tmp_path / "grid.png")
    assert [f"{tile.subject} {tile.score}" for tile in tiles] == captions
    assert tiles[3].score == "0.30"
    for tile, image in zip(tiles, images, strict=True):
        assert np.array_equal(np.asarray(tile.image), image)


def test_an_edit_is_shown_beside_its_source() -> None:
    file = io.BytesIO()
    Image.new("RGB", (2, 2), (9, 8, 7)).save(file, format="PNG")
    images = np.full((2, 4, 6, 3), 50, np.uint8)
    edited = [Prompt(text="x", index=i, images=(file.getvalue(),)) for i in range(2)]
    shown = with_sources(images, edited)
    assert shown.shape == (2, 4, 12, 3)
    assert (shown[:, :, :6] == (9, 8, 7)).all()
    assert np.array_equal(shown[:, :, 6:], images)
    assert with_sources(images, [edited[0], Prompt(text="y", index=1)]) is images
