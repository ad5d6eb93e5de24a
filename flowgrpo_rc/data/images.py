"""The condition images of a prompt, as a row of a prompt file names them."""

import base64
import re
from pathlib import Path

from flowgrpo_rc.data.readers import Row
from flowgrpo_rc.pictures import name_of, picture_size, verify_picture
from flowgrpo_rc.plugins import refuse
from flowgrpo_rc.reading import blaming

IMAGE_KEYS = ("image", "images")
MAX_PIXELS = 4096 * 4096  # of one image
_PATH = re.compile(r"(?!\w+://|data:).{1,4096}$")  # no address, and no content


def images_of(row: Row, folder: Path, where: str, most: int) -> tuple[str | bytes, ...]:
    """Returns the images of a row, paths or contents of files, once each has been looked at.

    Args:
      row: the columns of one prompt.
      folder: where paths start from.
      where: the place of the row, for messages.
      most: the most images of a prompt, which then has at least one; 0 refuses images.

    Raises:
      ValueError: there are too few or too many, or one is missing, too large or no picture.
    """
    columns = [row[key] for key in IMAGE_KEYS if row.get(key) is not None]
    lists = [value if isinstance(value, list) else [value] for value in columns]
    values = [image for images in lists for image in images]
    refuse(
        (len(columns) > 1, "has both image and images: give one of them"),
        (
            not min(most, 1) <= len(values) <= most,
            f"has {len(values) or 'no'} image{'s' * (len(values) > 1)}, and "
            f"rollout.pipeline.condition_images={most}: set it to the most images of a prompt; 0 "
            "is for prompts of text alone",
        ),
        about=f"{where}: ",
    )
    try:
        return tuple(_image(value, folder) for value in values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _image(value: object, folder: Path) -> str | bytes:
    """Returns the content of an image, or its path, which stands relative to the prompt file."""
    image: str | bytes
    match value:
        case {"bytes": bytes() as content}:
            image = content
        case {"base64": str() as text}:
            with blaming("the base64 of an image"):
                image = base64.b64decode(text, validate=True)
        case {"path": str() as path} | (str() as path) if _PATH.match(path):
            image = str(folder / Path(path).expanduser())
        case _:
            kinds = "a path, or an object with its path, bytes or base64"
            raise ValueError(f"an image must be {kinds}, got {value!r:.100}")
    width, height = picture_size(image)
    size = f"{name_of(image)} has {width} x {height} pixels"
    refuse((width * height > MAX_PIXELS, f"{size}, more than {MAX_PIXELS}: make it smaller"))
    verify_picture(image)
    return image
