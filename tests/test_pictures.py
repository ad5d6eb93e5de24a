"""Pictures that a user gives: read the right way up, and refused with their name."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from flowgrpo_rc.pictures import picture_size, read_picture, verify_picture


def content(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, format=kind, **options)
    return file.getvalue()


def gradient() -> Image.Image:
    return Image.fromarray(np.arange(24, dtype=np.uint8).reshape(2, 4, 3) * 10)


def test_a_path_and_its_content_are_the_same_picture(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(content(gradient()))
    for given in (str(path), path.read_bytes()):
        assert np.array_equal(read_picture(given), np.asarray(gradient()))
        assert picture_size(given) == (4, 2)
    with pytest.raises(ValueError, match="read-only"):
        read_picture(str(path))[0, 0, 0] = 1


def test_other_modes_become_rgb() -> None:
    found = read_picture(content(gradient().convert("L")))
    assert found.shape == (2, 4, 3)
    assert (found[..., 0] == found[..., 2]).all()


@pytest.mark.parametrize(("orientation", "turned"), [(3, 2), (6, 3), (8, 1)])
def test_a_picture_that_a_camera_took_sideways_is_turned(orientation: int, turned: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = content(gradient(), exif=exif)
    wanted = np.rot90(np.asarray(gradient()), turned)
    assert np.array_equal(read_picture(file), wanted)
    assert picture_size(file) == (wanted.shape[1], wanted.shape[0])


def test_what_is_no_whole_picture_is_refused_by_its_name(tmp_path: Path) -> None:
    whole = content(gradient().resize((64, 64)))
    path = tmp_path / "cut.png"
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"cut\.png cannot be read as a picture"):
        verify_picture(str(path))
    with pytest.raises(ValueError, match=r"cut\.png cannot be read as a picture"):
        read_picture(str(path))
    with pytest.raises(ValueError, match=r"there is no file /no/such\.png"):
        picture_size("/no/such.png")
    with pytest.raises(ValueError, match="an image of 5 bytes cannot be read"):
        read_picture(b"12345")
    # Pillow would hand this to a program of the machine.
    with pytest.raises(ValueError, match="cannot be read as a picture"):
        read_picture(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n")
