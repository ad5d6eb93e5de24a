"""Conditioning on images: sizes, mixed batches, files of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.subjects import make_subject
from support.tiny_models import VARIANTS

from flowgrpo_rc.batch import Prompt, SamplerSpec
from flowgrpo_rc.core.random import normal
from flowgrpo_rc.models.editing import EditingModel
from flowgrpo_rc.policies.encode_prompts import encode_prompts, encode_unique

TINY = VARIANTS["flux2_klein_edits"]


@pytest.fixture(scope="module")
def editor(saved: Callable[[str], Path]) -> EditingModel:
    model = make_subject("flux2_klein_edits", saved).load()
    assert isinstance(model, EditingModel)
    return model


@pytest.fixture
def spec() -> SamplerSpec:
    return TINY.spec("sde", TINY.guided)


def prompts(count: int) -> list[Prompt]:
    """Makes prompts: those with even numbers have two images, the others one."""
    return [Prompt(text=f"edit {i}", index=i, images=TINY.images(i)) for i in range(count)]


@pytest.mark.kernels
def test_samples_with_images_of_other_sizes_do_not_touch_each_other(editor, spec):
    latents = normal(editor.latent_shape(spec), [1, 2, 3], "latents")
    timesteps = torch.tensor([900.0, 500.0, 300.0])
    pair = encode_prompts(editor, prompts(3), spec)

    def velocity(rows: list[int]) -> torch.Tensor:
        index = torch.tensor(rows)
        conditioning, negative = (given[index] for given in pair)
        with torch.no_grad():
            return editor.velocity(
                editor.transformer, latents[index], timesteps[index], conditioning, negative, spec
            )

    alone = torch.cat([velocity([row]) for row in range(3)])
    torch.testing.assert_close(velocity([0, 1, 2]), alone, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(velocity([2, 1, 0]), alone.flip(0), atol=1e-5, rtol=1e-5)
    # The images take part, in their order.
    (first, second) = TINY.images(0)
    other = replace(prompts(1)[0], images=(second, first))
    changed, _ = encode_prompts(editor, [other], spec)
    first_negative = pair[1][torch.tensor([0])]
    inputs = latents[:1], timesteps[:1], changed, first_negative
    with torch.no_grad():
        swapped = editor.velocity(editor.transformer, *inputs, spec)
    assert (swapped - alone[:1]).abs().max() > 1e-3


def test_equal_texts_with_other_images_are_encoded_apart(editor, spec):
    same = [replace(prompt, text="edit") for prompt in prompts(3)]
    together = encode_unique(editor, [*same, same[0]], spec)
    assert together.image_sizes[0] == together.image_sizes[3] != together.image_sizes[1]
    assert together.images is not None
    assert torch.equal(together.images[0], together.images[3])
    assert not torch.equal(together.images[0], together.images[2])


@pytest.mark.parametrize(
    ("size", "pixels", "tokens"),
    [
        ((98, 71), 2**20, (8, 12)),  # what is left over is cropped
        ((128, 64), 64 * 32, (4, 8)),  # reduced
    ],
)
def test_tokens_of_an_image(editor, spec, size, pixels, tokens):
    spec = replace(spec, condition_pixels=pixels)
    assert editor.image_size(*size, spec) == tokens
    picture = replace(TINY, image_sizes=((size,),)).images(0)
    encoded = encode_unique(editor, [Prompt(text="x", index=0, images=picture)], spec)
    assert encoded.image_sizes == ((tokens,),)
    assert encoded.images is not None
    assert encoded.images.shape[1] == tokens[0] * tokens[1]


@pytest.mark.parametrize(("size", "words"), [((63, 64), "too small"), ((1000, 100), "ratio")])
def test_sizes_that_the_stock_pipeline_refuses(editor, spec, size, words):
    with pytest.raises(ValueError, match=words):
        editor.image_size(*size, spec)


def test_blank_conditioning_has_the_largest_images(editor: EditingModel, spec: SamplerSpec) -> None:
    spec = replace(spec, condition_pixels=64 * 64)
    blank = editor.blank_conditioning(3, spec)
    assert blank.image_sizes == (((8, 8), (8, 8)),) * 3
    assert blank.images is not None
    assert blank.images.shape == (3, 128, editor.transformer.config.in_channels)
    assert editor.blank_conditioning(3, replace(spec, condition_images=0)).images is None
