"""The JPEG reward."""

from __future__ import annotations

from io import BytesIO

import numpy as np
from PIL import Image
from support.prompts import numbered_prompts, random_images

from flowgrpo_rc.rewards.jpeg import Jpeg


def test_jpeg_sizes():
    noise = random_images(1, 64)[0]
    flat = np.full((64, 64, 3), 128, np.uint8)
    file = BytesIO()
    Image.fromarray(noise).save(file, "JPEG", quality=95)
    batch = np.stack([noise, flat])
    grow = Jpeg(objective="incompressibility")(batch, numbered_prompts(2)).values
    shrink = Jpeg(objective="compressibility")(batch, numbered_prompts(2)).values
    assert grow[0] == len(file.getvalue()) / 1000
    assert grow[0] > 4 * grow[1] > 0
    assert shrink == [-value for value in grow]
    assert (
        Jpeg(objective="incompressibility", quality=20)(batch, numbered_prompts(2)).values[0]
        < grow[0]
    )
