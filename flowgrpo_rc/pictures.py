"""Reading the pictures that prompts are about: those that the user gave, so they may be anything.

A picture is given as a path or as the content of a file (`Prompt.images`).

Shapes: H x W pixels.
"""

import hashlib
import io
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, TiffImagePlugin, UnidentifiedImageError

# Other formats that Pillow knows start programs or hold no picture.
_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")
_WIDTH, _HEIGHT, _BITS, _PHOTOMETRIC = 256, 257, 258, 262  # tags of TIFF
_ORIENTATION = 0x0112  # the EXIF tag of how a camera was held; 5 to 8 stand on their side
_HELD = 16  # pictures that are kept; all samples of a prompt are scored against the same
_FAULTS = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)


@lru_cache(maxsize=_HELD)
def read_picture(picture: str | bytes) -> np.ndarray:
    """Reads a picture, the right way up, as uint8 RGB [H, W, 3]. The last 16 are kept.

    The array is read-only, since others get the same. ValueError names what is no picture.
    """
    with _opened(picture) as image:
        pixels = rgb_pixels(image)
    pixels.setflags(write=False)
    return pixels


def rgb_pixels(image: Image.Image) -> np.ndarray:
    """Returns what a person sees of an opened picture, over white and the right way up.

    The result is uint8 RGB [H, W, 3].
    """
    turned = ImageOps.exif_transpose(image)
    if _is_deep(image):
        turned = Image.fromarray(_levels(np.asarray(turned), image))
    if turned.has_transparency_data:
        turned = turned.convert("RGBA")
        turned = Image.alpha_composite(Image.new("RGBA", turned.size, "white"), turned)
    return np.array(turned.convert("RGB"))


def verify_picture(picture: str | bytes) -> None:
    """Checks that a picture is whole and the only one in its file, or ValueError."""
    with _opened(picture) as image:
        frames = getattr(image, "n_frames", 1)
        if frames > 1 and image.format != "MPO":  # a photo, with maps for bright screens behind it
            raise ValueError(f"it has {frames} frames or pages: save the one that is meant")
        if image.format == "PNG":
            image.verify()
            return
        image.draft("L", (1, 1))  # decodes a JPEG in small, which takes less time
        image.load()


def picture_size(picture: str | bytes) -> tuple[int, int]:
    """Returns width and height of a picture, of which the beginning is read, or ValueError."""
    with _opened(picture) as image:
        width, height = image.size
        if isinstance(image, TiffImagePlugin.TiffImageFile):  # its size is that of the turned one
            width, height = image.tag_v2[_WIDTH], image.tag_v2[_HEIGHT]
        sideways = image.getexif().get(_ORIENTATION) in (5, 6, 7, 8)
        return (height, width) if sideways else (width, height)


def picture_bytes(picture: str | bytes) -> bytes:
    """Returns the content of a picture's file."""
    return picture if isinstance(picture, bytes) else Path(picture).read_bytes()


def picture_digest(picture: str | bytes) -> str:
    """Returns the SHA-256 of a picture's file, so that equal content is equal wherever it lies."""
    return hashlib.sha256(picture_bytes(picture)).hexdigest()


def name_of(picture: str | bytes) -> str:
    """Returns what messages call a picture: its path, or how many bytes it has."""
    return picture if isinstance(picture, str) else f"an image of {len(picture)} bytes"


@contextmanager
def _opened(picture: str | bytes) -> Iterator[Image.Image]:
    """Opens a picture; what is wrong with it becomes a ValueError that names it."""
    file = picture if isinstance(picture, str) else io.BytesIO(picture)
    try:
        with Image.open(file, formats=_FORMATS) as image:
            if image.mode not in _MODES and not _is_deep(image):
                raise ValueError(
                    f"its mode is {image.mode}, which does not say what is white: save it with 8 "
                    "or 16 bits a channel, as grey or RGB"
                )
            yield image
    except FileNotFoundError as error:
        raise ValueError(f"there is no file {name_of(picture)}") from error
    except UnidentifiedImageError as error:
        formats = ", ".join(_FORMATS)
        raise ValueError(
            f"{name_of(picture)} cannot be read as a picture: it is none of {formats}, or damaged"
        ) from error
    except _FAULTS as error:
        raise ValueError(
            f"{name_of(picture)} cannot be read as a picture ({type(error).__name__}: {error})"
        ) from error


def _is_deep(image: Image.Image) -> bool:
    """Returns whether an opened picture has greys of more than 8 bits."""
    # Older Pillow calls the 16 bits of a PNG by the mode of 32.
    return image.mode.startswith("I;16") or (image.mode, image.format) == ("I", "PNG")


def _levels(values: np.ndarray, image: Image.Image) -> np.ndarray:
    """Returns the 8-bit levels of deep greys [H, W]: value / 257 for 16 bits."""
    tags = image.tag_v2 if isinstance(image, TiffImagePlugin.TiffImageFile) else {}
    (bits,) = tags.get(_BITS, (16,))
    levels = np.rint(values * (255 / (2**bits - 1)))
    if tags.get(_PHOTOMETRIC) == 0:  # white is zero
        levels = 255 - levels
    levels[values == image.info.get("transparency", -1)] = 255
    return levels.astype(np.uint8)
