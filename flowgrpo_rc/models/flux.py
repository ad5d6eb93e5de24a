"""FLUX.1 dev and schnell (https://github.com/black-forest-labs/flux).

Legend: B samples, H and W height and width of a picture in pixels.
"""

from collections.abc import Sequence

import torch
from diffusers import ModelMixin
from torch import Tensor

from flowgrpo_rc.batch import Conditioning, SamplerSpec
from flowgrpo_rc.models.layout import (
    JOINT_ATTENTION,
    PackedModel,
    check_unguided,
    decode_picture,
    run_transformer,
)


class Flux(PackedModel):
    """FLUX.1: CLIP gives the pooled embedding, T5 the tokens; latents [B, H/16 * W/16, 64], packed.

    guidance_scale is an input of the transformer of `dev`; `schnell` has none. true_cfg_scale
    guides on a negative prompt, with a second evaluation.
    """

    pipeline_class = "FluxPipeline"
    cfg_key = "true_cfg_scale"
    embeds_guidance = True
    vae_in_bf16 = True
    default_target_modules = (
        *JOINT_ATTENTION,
        "ff.net.0.proj",
        "ff.net.2",
        "ff_context.net.0.proj",
        "ff_context.net.2",
    )

    def check(self, spec: SamplerSpec, key: str) -> None:
        """Refuses sizes that do not fill whole patches, and guidance that has no effect."""
        super().check(spec, key)
        if not self.transformer.config.guidance_embeds:
            instead = f"set it to 1 ({key}.true_cfg_scale guides on a negative prompt)"
            check_unguided(spec, key, f"has a transformer that takes no guidance; {instead}")

    def _encode(self, prompts: Sequence[str], *, max_sequence_length: int) -> Conditioning:
        embeds, pooled, _ = self._stock_encoding(prompts, max_sequence_length)
        return Conditioning(embeds=embeds, pooled=pooled)

    def _predict(
        self, transformer: ModelMixin, x: Tensor, at: Tensor, text: Conditioning, spec: SamplerSpec
    ) -> Tensor:
        axes = (torch.arange(size, device=x.device) for size in (1, *self._patches(spec)))
        positions = torch.cartesian_prod(*axes).to(x.dtype)
        guidance = x.new_full((len(x),), spec.guidance_scale)
        return run_transformer(
            transformer,
            x,
            text,
            timestep=at / 1000,
            guidance=guidance if transformer.config.guidance_embeds else None,
            txt_ids=positions.new_zeros(text.embeds.shape[1], 3),
            img_ids=positions,
        )

    def _decode(self, latents: Tensor, spec: SamplerSpec) -> Tensor:
        config = self.pipeline.vae.config
        picture = self._unpacked(latents, spec)
        return decode_picture(self.pipeline, picture / config.scaling_factor + config.shift_factor)
