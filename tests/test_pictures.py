"""Pictures that a user gives: read the right way up, and refused with their name."""

from __future__ import annotations

import io
import struct
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


def orientation(number: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = number
    return exif


def test_a_path_and_its_content_are_the_same_picture(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(content(gradient()))
    for given in (str(path), path.read_bytes()):
        assert np.array_equal(read_picture(given), np.asarray(gradient()))
        assert picture_size(given) == (4, 2)
    with pytest.raises(ValueError, match="read-only"):
        read_picture(str(path))[0, 0, 0] = 1


RAMP = np.arange(256, dtype=np.uint16).reshape(2, 128)


def deep(kind: str, mode: str = "I;16", **options: object) -> bytes:
    """Returns a file of 256 greys with 16 bits each; `I;16B` is TIFF's other order of bytes."""
    values = (RAMP * 257).astype(">u2" if mode == "I;16B" else "<u2")
    return content(Image.frombytes(mode, (128, 2), values.tobytes()), kind, **options)


def retagged(file: bytes, tag: int, value: int, was: int) -> bytes:
    """Returns a TIFF of little-endian bytes in which a tag with a short number has another one."""
    head = struct.pack("<HHI", tag, 3, 1)
    assert file.count(head + struct.pack("<I", was)) == 1
    return file.replace(head + struct.pack("<I", was), head + struct.pack("<I", value))


def flat(mode: str, colour: object) -> Image.Image:
    return Image.new(mode, (4, 2), colour)


@pytest.mark.parametrize(
    ("file", "wanted"),
    [
        (deep("PNG"), RAMP),
        (deep("TIFF"), RAMP),
        (deep("TIFF", "I;16B"), RAMP),
        (retagged(content(flat("I;16", 65535), "TIFF"), 258, 12, was=16), np.full((2, 4), 255)),
        # White is zero.
        (retagged(deep("TIFF"), 262, 0, was=1), 255 - RAMP),
        (deep("PNG", exif=orientation(3)), np.rot90(RAMP, 2)),
    ],
)
def test_a_grey_of_more_than_8_bits_keeps_its_levels(file: bytes, wanted: np.ndarray) -> None:
    found = read_picture(file)
    assert found.dtype == np.uint8
    assert np.array_equal(found, np.repeat(wanted[..., None], 3, axis=2))


def indexed() -> Image.Image:
    image = Image.new("P", (4, 2), 1)
    image.putpalette([0, 0, 0, 200, 100, 50])
    return image


@pytest.mark.parametrize(
    ("image", "kind", "options", "wanted"),
    [
        (flat("1", 1), "PNG", {}, [255, 255, 255]),
        (flat("L", 77), "PNG", {"transparency": 77}, [255, 255, 255]),
        (flat("LA", (0, 51)), "PNG", {}, [204, 204, 204]),
        (indexed(), "PNG", {}, [200, 100, 50]),
        (indexed(), "PNG", {"transparency": 1}, [255, 255, 255]),
        (indexed(), "GIF", {"transparency": 1}, [255, 255, 255]),
        (flat("RGB", (9, 8, 7)), "PNG", {"transparency": (9, 8, 7)}, [255, 255, 255]),
        (flat("RGBA", (200, 100, 50, 255)), "WEBP", {"lossless": True}, [200, 100, 50]),
        (flat("RGBA", (200, 100, 0, 51)), "PNG", {}, [244, 224, 204]),
        (flat("RGBA", (200, 100, 0, 0)), "TIFF", {}, [255, 255, 255]),
        (flat("CMYK", (0, 255, 255, 0)), "TIFF", {}, [255, 0, 0]),
        (flat("CMYK", (0, 0, 0, 155)), "JPEG", {}, [100, 100, 100]),
        (flat("I;16", 9), "PNG", {"transparency": 9}, [255, 255, 255]),
    ],
)
def test_every_mode_is_read_as_a_person_sees_it(image, kind, options, wanted) -> None:
    """Transparent parts are white, as on a page; their hidden colours are not shown."""
    found = read_picture(content(image, kind, **options))
    assert found.shape == (2, 4, 3)
    assert np.abs(found.astype(int) - wanted).max() <= (1 if "A" in image.mode else 0)


@pytest.mark.parametrize("mode", ["F", "I", "LAB"])
def test_a_mode_whose_white_is_unknown_is_refused(mode: str) -> None:
    file = content(flat(mode, 1 if mode != "LAB" else (50, 1, 1)), "TIFF")
    for read in (read_picture, picture_size, verify_picture):
        with pytest.raises(
            ValueError, match=f"picture .*mode is {mode}.*: save it with 8 or 16 bits"
        ):
            read(file)


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
@pytest.mark.parametrize(("number", "turned"), [(3, 2), (6, 3), (8, 1), (99, 0)])
def test_a_picture_that_a_camera_took_sideways_is_turned(
    kind: str, number: int, turned: int
) -> None:
    file = content(gradient(), kind, exif=orientation(number))
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
    with pytest.raises(ValueError, match=r"none of PNG, JPEG, WEBP, BMP, GIF, TIFF, or damaged"):
        read_picture(b"<svg></svg>")
    # Pillow would hand this to a program of the machine.
    with pytest.raises(ValueError, match="cannot be read as a picture"):
        read_picture(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF"])
def test_a_picture_that_ends_early_is_refused_before_it_is_needed(kind: str) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 96, 3), dtype=np.uint8)
    whole = content(Image.fromarray(noise), kind)
    verify_picture(whole)
    with pytest.raises(ValueError, match="cannot be read as a picture"):
        verify_picture(whole[: len(whole) * 2 // 3])


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "GIF", "TIFF"])
def test_of_several_frames_none_is_chosen(kind: str) -> None:
    frames = [flat("RGB", colour) for colour in ("red", "green", "blue")]
    verify_picture(content(frames[0], kind, save_all=True))
    with pytest.raises(ValueError, match="it has 3 frames or pages: save the one that is meant"):
        verify_picture(content(frames[0], kind, save_all=True, append_images=frames[1:]))


def test_a_photo_may_have_others_behind_it() -> None:
    photo, behind = (flat("RGB", colour) for colour in ("red", "blue"))
    file = content(photo, "MPO", save_all=True, append_images=[behind])
    verify_picture(file)
    assert np.abs(read_picture(file).astype(int) - [255, 0, 0]).max() <= 1
