"""Qwen-Image-Edit 2509 and 2511 (https://github.com/QwenLM/Qwen-Image).

Legend: H and W height and width of a picture in pixels.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import (
    CONDITION_IMAGE_SIZE,
    calculate_dimensions,
)
from PIL import Image
from transformers import PreTrainedTokenizerBase

from flowgrpo_rc.batch import Conditioning, SamplerSpec
from flowgrpo_rc.models.editing import EditingModel
from flowgrpo_rc.models.qwen_image import QwenFamily
from flowgrpo_rc.plugins import refuse

_MOST_ELONGATED = 32  # ratio of the sides, from which on a side has no pixel left


class QwenImageEdit(QwenFamily, EditingModel):
    """Qwen-Image-Edit: Qwen2.5-VL gives the tokens of text and images together.

    The transformer gets each image a second time, as latents of `condition_pixels` in its own
    proportions. The stock pipeline does not cut prompts, whatever `max_sequence_length` is.
    """

    pipeline_class = "QwenImageEditPlusPipeline"
    needs_images = True
    packages = ("torchvision",)

    def most_tokens(self, tokenizer: PreTrainedTokenizerBase, spec: SamplerSpec) -> None:
        """Returns None: the stock pipeline does not cut."""

    def image_size(self, width: int, height: int, spec: SamplerSpec) -> tuple[int, int]:
        """Returns the tokens of an image once it has the area that the transformer gets."""
        fits = 1 / _MOST_ELONGATED < width / height < _MOST_ELONGATED
        limit = f"this model takes sides of at most {_MOST_ELONGATED} to 1"
        refuse((not fits, f"{width} x {height} pixels: {limit}"))
        columns, rows = (
            pixels // (2 * self.pipeline.vae_scale_factor)
            for pixels in calculate_dimensions(spec.condition_pixels, width / height)
        )
        return rows, columns

    def blank_conditioning(self, count: int, spec: SamplerSpec) -> Conditioning:
        """Returns tokens of text, those of the images among it, and the images' latents."""
        vision = self.pipeline.text_encoder.config.vision_config
        side = vision.patch_size * vision.spatial_merge_size
        seen = math.ceil(math.isqrt(CONDITION_IMAGE_SIZE) / side) ** 2 * spec.condition_images
        longer = replace(spec, max_sequence_length=spec.max_sequence_length + seen)
        return self.with_blank_images(super().blank_conditioning(count, longer), spec)

    def _encode(self, prompts: Sequence[str], *, max_sequence_length: int) -> Conditioning:
        raise ValueError("Qwen-Image-Edit encodes prompts with their images (encode_edits)")

    def _encode_edit(
        self, prompt: str, images: Sequence[Image.Image], spec: SamplerSpec
    ) -> Conditioning:
        processor = self.pipeline.image_processor
        seen = []
        tokens = []
        sizes = []
        for image in images:
            ratio = image.width / image.height
            width, height = calculate_dimensions(CONDITION_IMAGE_SIZE, ratio)
            seen.append(processor.resize(image, height, width))
            width, height = calculate_dimensions(spec.condition_pixels, ratio)
            pixels = processor.preprocess(image, height, width).unsqueeze(2)
            latents = self.pipeline._encode_vae_image(
                pixels.to(self.device, self.pipeline.vae.dtype), generator=None
            )
            rows, columns = latents.shape[3:]
            channels = latents.shape[1]
            tokens.append(self.pipeline._pack_latents(latents, 1, channels, rows, columns))
            sizes.append((rows // 2, columns // 2))
        embeds, mask = self.pipeline.encode_prompt(prompt, image=seen, device=self.device)
        return Conditioning(
            embeds=embeds,
            mask=None if mask is None else mask.bool(),
            images=torch.cat(tokens, dim=1),
            image_sizes=(tuple(sizes),),
        )
