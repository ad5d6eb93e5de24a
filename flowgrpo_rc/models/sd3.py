"""Stable Diffusion 3 and 3.5 (MM-DiT, https://arxiv.org/abs/2403.03206).

Legend: B samples, C latent channels, H and W height and width of a picture in pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flowgrpo_rc.batch import Conditioning, SamplerSpec
from flowgrpo_rc.models.base import FlowModel, Schedule
from flowgrpo_rc.models.layout import check_size, dynamic_shift, input_dtype


class StableDiffusion3(FlowModel):
    """Stable Diffusion 3: two CLIP encoders and, optionally, T5; latents [B, C, H/8, W/8].

    guidance_scale guides on a negative prompt. Both prompts go through the transformer in one
    batch, the negative ones first, as in the stock pipeline.
    """

    pipeline_class = "StableDiffusion3Pipeline"
    default_target_modules = (
        "attn.add_k_proj",
        "attn.add_q_proj",
        "attn.add_v_proj",
        "attn.to_add_out",
        "attn.to_k",
        "attn.to_out.0",
        "attn.to_q",
        "attn.to_v",
    )

    def _encode(self, prompts: Sequence[str], *, max_sequence_length: int) -> Conditioning:
        embeds, _, pooled, _ = self.pipeline.encode_prompt(
            list(prompts),
            None,
            None,
            do_classifier_free_guidance=False,
            max_sequence_length=max_sequence_length,
            device=self.device,
        )
        return Conditioning(embeds=embeds, pooled=pooled)

    def blank_conditioning(self, count: int, spec: SamplerSpec) -> Conditioning:
        """Returns T5's tokens behind those of CLIP."""
        length = self.pipeline.tokenizer_max_length + spec.max_sequence_length
        return super().blank_conditioning(count, replace(spec, max_sequence_length=length))

    def check(self, spec: SamplerSpec, key: str) -> None:
        """Refuses sizes that do not fill whole patches, or exceed the position embeddings."""
        multiple = self.pipeline.vae_scale_factor * self.pipeline.patch_size
        check_size(
            spec, multiple=multiple, largest=self.transformer.config.pos_embed_max_size * multiple
        )

    def latent_shape(self, spec: SamplerSpec) -> tuple[int, ...]:
        """Returns channels, height and width of the latents."""
        factor = self.pipeline.vae_scale_factor
        return self.transformer.config.in_channels, spec.height // factor, spec.width // factor

    def schedule(self, spec: SamplerSpec) -> Schedule:
        """Returns the scheduler's own sigmas, shifted for the size if its settings say so."""
        scheduler = self.scheduler
        shift = {}
        if scheduler.config.use_dynamic_shifting:
            patch = self.pipeline.patch_size
            _, rows, columns = self.latent_shape(spec)
            shift["mu"] = dynamic_shift(scheduler, (rows // patch) * (columns // patch))
        scheduler.set_timesteps(spec.num_inference_steps, device=self.device, **shift)
        return Schedule(scheduler.sigmas.clone(), scheduler.timesteps.clone())

    def velocity(
        self,
        transformer: Any,
        latents: Tensor,
        timesteps: Tensor,
        conditioning: Conditioning,
        negative: Conditioning | None,
        spec: SamplerSpec,
    ) -> Tensor:
        """Predicts the velocity; `guidance_scale` guides if there is a negative prompt."""
        embeds = conditioning.embeds
        pooled = _pooled(conditioning)
        if negative is not None:
            latents = torch.cat([latents] * 2)
            timesteps = torch.cat([timesteps] * 2)
            embeds = torch.cat([negative.embeds, embeds])
            pooled = torch.cat([_pooled(negative), pooled])
        dtype = input_dtype(transformer)
        predicted = transformer(
            hidden_states=latents.to(dtype),
            timestep=timesteps,
            encoder_hidden_states=embeds.to(dtype),
            pooled_projections=pooled.to(dtype),
            return_dict=False,
        )[0].float()
        if negative is None:
            return predicted
        unguided, guided = predicted.chunk(2)
        return unguided + self.cfg_scale(spec) * (guided - unguided)

    def _decode(self, latents: Tensor, spec: SamplerSpec) -> Tensor:
        vae = self.pipeline.vae
        scaled = latents / vae.config.scaling_factor + vae.config.shift_factor
        decoded = vae.decode(scaled.to(vae.dtype), return_dict=False)[0]
        return self.pipeline.image_processor.postprocess(decoded, output_type="pt")


def _pooled(conditioning: Conditioning) -> Tensor:
    assert conditioning.pooled is not None, "SD3 conditioning has a pooled embedding"
    return conditioning.pooled
