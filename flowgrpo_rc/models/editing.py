"""Flow models that edit: their prompts bring pictures.

Legend: B samples, P prompts, N tokens of the condition images of a prompt, C their width.
"""

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from PIL import Image
from torch import Tensor, nn

from flowgrpo_rc.batch import Conditioning, ImageSizes, SamplerSpec
from flowgrpo_rc.models.base import FlowModel
from flowgrpo_rc.models.layout import in_groups
from flowgrpo_rc.models.prompt_cache import TextAndImages
from flowgrpo_rc.pictures import read_picture


class EditingModel(FlowModel):
    """A flow model whose transformer also sees the latents of pictures, as further tokens.

    The pictures of a batch may differ in number and size. `packages` have to be importable.
    """

    takes_images = True
    packages: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def image_size(self, width: int, height: int, spec: SamplerSpec) -> tuple[int, int]:
        """Returns rows and columns of a condition image's tokens; ValueError for a wrong size."""

    @torch.no_grad()
    def encode_edits(self, edits: Sequence[TextAndImages], spec: SamplerSpec) -> Conditioning:
        """Encodes P prompts together with their images."""
        encoded = []
        with self.encoders_at_work(), self._vae.at_work():
            for text, images in edits:
                pictures = [Image.fromarray(read_picture(image)) for image in images]
                encoded.append(self._encode_edit(text, pictures, spec))
        return Conditioning.join(encoded)

    def velocity(
        self,
        transformer: nn.Module,
        latents: Tensor,
        timesteps: Tensor,
        conditioning: Conditioning,
        negative: Conditioning | None,
        spec: SamplerSpec,
    ) -> Tensor:
        """Predicts the velocity; images of other sizes take a forward of their own."""
        rows_of: dict[ImageSizes, list[int]] = {}
        for row, sizes in enumerate(conditioning.image_sizes):
            rows_of.setdefault(sizes, []).append(row)
        predict = super().velocity
        if len(rows_of) < 2:
            other = None if negative is None else _without_padding(negative)
            text = _without_padding(conditioning)
            return predict(transformer, latents, timesteps, text, other, spec)

        def of_group(_: int, rows: Tensor) -> Tensor:
            other = None if negative is None else _without_padding(negative[rows])
            text = _without_padding(conditioning[rows])
            return predict(transformer, latents[rows], timesteps[rows], text, other, spec)

        groups = [torch.tensor(rows, device=latents.device) for rows in rows_of.values()]
        return in_groups(groups, of_group)

    def with_blank_images(self, blank: Conditioning, spec: SamplerSpec) -> Conditioning:
        """Adds tokens of square images to blank conditioning: as many as prompts can have."""
        if spec.condition_images == 0:
            return blank
        side = math.isqrt(spec.condition_pixels)
        sizes = (self.image_size(side, side, spec),) * spec.condition_images
        num_tokens = sum(math.prod(size) for size in sizes)
        width = self.transformer.config.in_channels
        images = torch.empty(len(blank), num_tokens, width, dtype=torch.float32)
        return replace(blank, images=images, image_sizes=(sizes,) * len(blank))

    @abstractmethod
    def _encode_edit(
        self, prompt: str, images: Sequence[Image.Image], spec: SamplerSpec
    ) -> Conditioning:
        """Encodes one prompt for `encode_edits`, which has put encoders and VAE on the device."""


def _without_padding(conditioning: Conditioning) -> Conditioning:
    """Drops the padding of images whose sizes are the same in all rows."""
    if conditioning.images is None:
        return conditioning
    num_tokens = sum(math.prod(size) for size in conditioning.image_sizes[0])
    return replace(conditioning, images=conditioning.images[:, :num_tokens])
