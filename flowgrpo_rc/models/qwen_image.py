"""Qwen-Image (https://arxiv.org/abs/2508.02324).

Legend: B samples, H and W height and width of a picture in pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flowgrpo_rc.batch import Conditioning, SamplerSpec
from flowgrpo_rc.models.base import FlowModel, Schedule
from flowgrpo_rc.models.layout import (
    check_size,
    input_dtype,
    linear_schedule,
    unpack,
    unscaled,
)


class QwenFamily(FlowModel):
    """Does what Qwen-Image and Qwen-Image-Edit share; latents [B, H/16 * W/16, 64], packed.

    Prompts keep their own length, so their tokens have a mask. true_cfg_scale guides on a negative
    prompt.
    """

    cfg_key = "true_cfg_scale"
    max_sequence_length = 1024
    default_target_modules = (
        "attn.add_k_proj",
        "attn.add_q_proj",
        "attn.add_v_proj",
        "attn.to_add_out",
        "attn.to_k",
        "attn.to_out.0",
        "attn.to_q",
        "attn.to_v",
        "img_mlp.net.0.proj",
        "img_mlp.net.2",
        "txt_mlp.net.0.proj",
        "txt_mlp.net.2",
    )

    def check(self, spec: SamplerSpec, key: str) -> None:
        """Refuses sizes that do not fill whole patches."""
        check_size(spec, multiple=2 * self.pipeline.vae_scale_factor)

    def blank_conditioning(self, count: int, spec: SamplerSpec) -> Conditioning:
        """Returns tokens with a mask, as prompts of several lengths have."""
        blank = super().blank_conditioning(count, spec)
        return replace(blank, mask=torch.ones(blank.embeds.shape[:2], dtype=torch.bool))

    def latent_shape(self, spec: SamplerSpec) -> tuple[int, ...]:
        """Returns one token for each patch of 2 x 2 latents, with all their channels."""
        rows, columns = self._patches(spec)
        return rows * columns, self.transformer.config.in_channels

    def schedule(self, spec: SamplerSpec) -> Schedule:
        """Returns evenly spaced sigmas, shifted for the number of tokens."""
        rows, columns = self._patches(spec)
        return linear_schedule(
            self.scheduler, spec.num_inference_steps, rows * columns, self.device
        )

    def _velocity(
        self,
        transformer: Any,
        latents: Tensor,
        timesteps: Tensor,
        conditioning: Conditioning,
        negative: Conditioning | None,
        spec: SamplerSpec,
    ) -> Tensor:
        """Predicts the velocity of samples whose images, if they have any, have the same sizes.

        A guided velocity keeps the length that it has without guidance.
        """
        sizes = conditioning.image_sizes[0] if conditioning.image_sizes else ()
        shapes = [(1, *size) for size in (self._patches(spec), *sizes)]
        tokens = latents
        if conditioning.images is not None:
            tokens = torch.cat([latents, conditioning.images], dim=1)
        dtype = input_dtype(transformer)

        def predict(text: Conditioning) -> Tensor:
            predicted: Tensor = transformer(
                hidden_states=tokens.to(dtype),
                timestep=timesteps / 1000,
                encoder_hidden_states=text.embeds.to(dtype),
                encoder_hidden_states_mask=text.mask,
                img_shapes=[shapes] * len(latents),
                return_dict=False,
            )[0]
            return predicted[:, : latents.shape[1]].float()

        guided = predict(conditioning)
        if negative is None:
            return guided
        unguided = predict(negative)
        combined = unguided + self.cfg_scale(spec) * (guided - unguided)
        # Guidance makes the velocity of a token longer; the stock pipeline takes that back.
        return combined * (guided.norm(dim=-1, keepdim=True) / combined.norm(dim=-1, keepdim=True))

    def _decode(self, latents: Tensor, spec: SamplerSpec) -> Tensor:
        vae = self.pipeline.vae
        frames = unpack(latents, *self._patches(spec)).unsqueeze(2).to(vae.dtype)
        decoded = vae.decode(unscaled(frames, vae), return_dict=False)[0][:, :, 0]
        return self.pipeline.image_processor.postprocess(decoded, output_type="pt")

    def _patches(self, spec: SamplerSpec) -> tuple[int, int]:
        """Rows and columns of the image's tokens."""
        side = 2 * self.pipeline.vae_scale_factor
        return spec.height // side, spec.width // side


class QwenImage(QwenFamily):
    """Qwen-Image: Qwen2.5-VL gives the tokens of text."""

    pipeline_class = "QwenImagePipeline"

    def velocity(
        self,
        transformer: Any,
        latents: Tensor,
        timesteps: Tensor,
        conditioning: Conditioning,
        negative: Conditioning | None,
        spec: SamplerSpec,
    ) -> Tensor:
        """Predicts the velocity. A guided one keeps the length that it has without guidance."""
        return self._velocity(transformer, latents, timesteps, conditioning, negative, spec)

    def _encode(self, prompts: Sequence[str], *, max_sequence_length: int) -> Conditioning:
        embeds, mask = self.pipeline.encode_prompt(
            list(prompts), device=self.device, max_sequence_length=max_sequence_length
        )
        return Conditioning(embeds=embeds, mask=None if mask is None else mask.bool())
