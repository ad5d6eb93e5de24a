"""FLUX.1 dev and schnell (https://github.com/black-forest-labs/flux).

Legend: B samples, H and W height and width of a picture in pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flowgrpo_rc.batch import Conditioning, SamplerSpec
from flowgrpo_rc.models.base import FlowModel, Schedule
from flowgrpo_rc.models.layout import check_size, input_dtype, linear_schedule, unpack


class Flux(FlowModel):
    """FLUX.1: CLIP gives the pooled embedding, T5 the tokens; latents [B, H/16 * W/16, 64], packed.

    guidance_scale is an input of the transformer of `dev`; `schnell` has none. true_cfg_scale
    guides on a negative prompt, with a second evaluation.
    """

    pipeline_class = "FluxPipeline"
    cfg_key = "true_cfg_scale"
    embeds_guidance = True
    default_target_modules = (
        "attn.add_k_proj",
        "attn.add_q_proj",
        "attn.add_v_proj",
        "attn.to_add_out",
        "attn.to_k",
        "attn.to_out.0",
        "attn.to_q",
        "attn.to_v",
        "ff.net.0.proj",
        "ff.net.2",
        "ff_context.net.0.proj",
        "ff_context.net.2",
    )

    def check(self, spec: SamplerSpec, key: str) -> None:
        """Refuses sizes that do not fill whole patches, and guidance that has no effect."""
        check_size(spec, multiple=2 * self.pipeline.vae_scale_factor)
        if not self.transformer.config.guidance_embeds and spec.guidance_scale != 1:
            raise ValueError(
                f"{key}.guidance_scale={spec.guidance_scale} has no effect: this checkpoint's "
                f"transformer takes no guidance; set it to 1 ({key}.true_cfg_scale guides on a "
                "negative prompt)"
            )

    def _encode(self, prompts: Sequence[str], *, max_sequence_length: int) -> Conditioning:
        embeds, pooled, _ = self.pipeline.encode_prompt(
            list(prompts), device=self.device, max_sequence_length=max_sequence_length
        )
        return Conditioning(embeds=embeds, pooled=pooled)

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

    def velocity(
        self,
        transformer: Any,
        latents: Tensor,
        timesteps: Tensor,
        conditioning: Conditioning,
        negative: Conditioning | None,
        spec: SamplerSpec,
    ) -> Tensor:
        """Predicts the velocity; `true_cfg_scale` guides if there is a negative prompt."""
        axes = (torch.arange(size, device=latents.device) for size in (1, *self._patches(spec)))
        positions = torch.cartesian_prod(*axes).to(latents.dtype)
        guidance = latents.new_full((len(latents),), spec.guidance_scale)

        dtype = input_dtype(transformer)

        def predict(text: Conditioning) -> Tensor:
            assert text.pooled is not None, "FLUX conditioning has a pooled embedding"
            predicted: Tensor = transformer(
                hidden_states=latents.to(dtype),
                timestep=timesteps / 1000,
                guidance=guidance if transformer.config.guidance_embeds else None,
                pooled_projections=text.pooled.to(dtype),
                encoder_hidden_states=text.embeds.to(dtype),
                txt_ids=positions.new_zeros(text.embeds.shape[1], 3),
                img_ids=positions,
                return_dict=False,
            )[0]
            return predicted.float()

        guided = predict(conditioning)
        if negative is None:
            return guided
        unguided = predict(negative)
        return unguided + self.cfg_scale(spec) * (guided - unguided)

    def _decode(self, latents: Tensor, spec: SamplerSpec) -> Tensor:
        vae = self.pipeline.vae
        scaled = (
            unpack(latents, *self._patches(spec)) / vae.config.scaling_factor
            + vae.config.shift_factor
        )
        decoded = vae.decode(scaled.to(vae.dtype), return_dict=False)[0]
        return self.pipeline.image_processor.postprocess(decoded, output_type="pt")

    def _patches(self, spec: SamplerSpec) -> tuple[int, int]:
        """Rows and columns of the image's tokens."""
        side = 2 * self.pipeline.vae_scale_factor
        return spec.height // side, spec.width // side
