"""FLUX.2 klein, 4B and 9B, distilled and base (https://github.com/black-forest-labs/flux2).

Legend: B samples, H and W height and width of a picture in pixels.
"""

import math
from collections.abc import Sequence

import torch
from diffusers import ModelMixin
from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu
from PIL import Image
from torch import Tensor

from flowgrpo_rc.batch import Conditioning, SamplerSpec
from flowgrpo_rc.models.base import Schedule
from flowgrpo_rc.models.editing import EditingModel
from flowgrpo_rc.models.layout import (
    JOINT_ATTENTION,
    check_size,
    check_unguided,
    decode_picture,
    run_transformer,
    shifted_schedule,
)

# An image's place on the first axis of positions: 0 for the one that is made, then 10, 20, ...
_BETWEEN_IMAGES = 10


class Flux2Klein(EditingModel):
    """FLUX.2 klein: Qwen3 gives the tokens of text; latents [128, H/16, W/16].

    A prompt may bring images, or none. Their tokens follow those of the picture that is made. Text
    is padded to `max_sequence_length`, and padding counts, as in the stock pipeline. The distilled
    checkpoints take no guidance; the stock pipeline of the others guides on an empty prompt.
    """

    pipeline_class = "Flux2KleinPipeline"
    thinking = False
    vae_in_bf16 = True
    default_target_modules = (
        *JOINT_ATTENTION,
        "attn.to_qkv_mlp_proj",
        "ff.linear_in",
        "ff.linear_out",
        "ff_context.linear_in",
        "ff_context.linear_out",
    )

    def check(self, spec: SamplerSpec, key: str) -> None:
        """Refuses sizes that do not fill whole patches, and guidance of a distilled checkpoint."""
        check_size(spec, key, multiple=self._side)
        if self.pipeline.config.is_distilled:
            check_unguided(spec, key, "is distilled to do without guidance; set it to 1")

    def image_size(self, width: int, height: int, spec: SamplerSpec) -> tuple[int, int]:
        """Returns the tokens that are left of an image once it is reduced and cropped."""
        self.pipeline.image_processor.check_image_input(Image.new("1", (width, height)))
        scale = min(1.0, math.sqrt(spec.condition_pixels / (width * height)))
        return int(height * scale) // self._side, int(width * scale) // self._side

    def blank_conditioning(self, count: int, spec: SamplerSpec) -> Conditioning:
        """Returns tokens of text and of images."""
        return self.with_blank_images(super().blank_conditioning(count, spec), spec)

    def _encode(self, prompts: Sequence[str], *, max_sequence_length: int) -> Conditioning:
        embeds, _ = self._stock_encoding(prompts, max_sequence_length)
        return Conditioning(embeds=embeds)

    def _encode_edit(
        self, prompt: str, images: Sequence[Image.Image], spec: SamplerSpec
    ) -> Conditioning:
        text = self._encode([prompt], max_sequence_length=spec.max_sequence_length)
        processor = self.pipeline.image_processor
        encoded = []
        for image in images:
            rows, columns = self.image_size(*image.size, spec)
            pixels = processor.preprocess(
                processor._resize_if_exceeds_area(image, spec.condition_pixels),
                height=rows * self._side,
                width=columns * self._side,
                resize_mode="crop",
            ).to(self.device, self.pipeline.vae.dtype)
            encoded.append(self.pipeline._encode_vae_image(pixels, generator=None))
        return Conditioning(
            embeds=text.embeds,
            images=torch.cat([_packed(latents) for latents in encoded], dim=1),
            image_sizes=(tuple((latents.shape[2], latents.shape[3]) for latents in encoded),),
        )

    def latent_shape(self, spec: SamplerSpec) -> tuple[int, ...]:
        """Returns one channel for each of the latents of a patch of 2 x 2."""
        return self.transformer.config.in_channels, *self._patches(spec)

    def schedule(self, spec: SamplerSpec) -> Schedule:
        """Returns evenly spaced sigmas, shifted for the number of tokens and of steps."""
        rows, columns = self._patches(spec)
        steps = spec.num_inference_steps
        mu = compute_empirical_mu(image_seq_len=rows * columns, num_steps=steps)
        return shifted_schedule(self.scheduler, steps, mu, self.device)

    def _predict(
        self, transformer: ModelMixin, x: Tensor, at: Tensor, text: Conditioning, spec: SamplerSpec
    ) -> Tensor:
        sizes = (self._patches(spec), *(text.image_sizes[0] if text.image_sizes else ()))
        positions = [
            _positions(i * _BETWEEN_IMAGES, *size, 1, x.device) for i, size in enumerate(sizes)
        ]
        tokens = _packed(x)
        made = tokens.shape[1]
        if text.images is not None:
            tokens = torch.cat([tokens, text.images], dim=1)
        predicted = run_transformer(
            transformer,
            tokens,
            text,
            timestep=at / 1000,
            guidance=None,
            txt_ids=_positions(0, 1, 1, text.embeds.shape[1], x.device),
            img_ids=torch.cat(positions),
        )
        return predicted[:, :made].transpose(1, 2).unflatten(2, x.shape[2:])

    def _decode(self, latents: Tensor, spec: SamplerSpec) -> Tensor:
        return decode_picture(self.pipeline, self.vae_latents(latents))

    def vae_latents(self, latents: Tensor) -> Tensor:
        """Returns final latents as the VAE takes them, [B, 32, H/8, W/8]."""
        vae = self.pipeline.vae
        mean, variance = (
            value.reshape(1, -1, 1, 1).to(latents)
            for value in (vae.bn.running_mean, vae.bn.running_var + vae.config.batch_norm_eps)
        )
        unpatchified: Tensor = self.pipeline._unpatchify_latents(latents * variance.sqrt() + mean)
        return unpatchified

    @property
    def _side(self) -> int:
        """Pixels of the side of a token."""
        return 2 * int(self.pipeline.vae_scale_factor)

    def _patches(self, spec: SamplerSpec) -> tuple[int, int]:
        """Rows and columns of the image's tokens."""
        return spec.height // self._side, spec.width // self._side


def _packed(latents: Tensor) -> Tensor:
    """Returns latents [B, C, rows, columns] as tokens, [B, rows * columns, C]."""
    return latents.flatten(2).transpose(1, 2)


def _positions(place: int, rows: int, columns: int, length: int, device: torch.device) -> Tensor:
    """Returns positions of tokens on four axes, int64, [rows * columns * length, 4]."""
    # Made on the device: a copy to it would make the host wait.
    ends = ((place, place + 1), (0, rows), (0, columns), (0, length))
    return torch.cartesian_prod(*(torch.arange(*pair, device=device) for pair in ends))
