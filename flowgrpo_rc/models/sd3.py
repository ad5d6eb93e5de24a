"""Stable Diffusion 3 and 3.5 (MM-DiT, https://arxiv.org/abs/2403.03206).

Legend: B samples, C latent channels, H and W height and width of a picture in pixels.
"""

from collections.abc import Sequence
from dataclasses import replace

from diffusers import ModelMixin
from torch import Tensor

from flowgrpo_rc.batch import Conditioning, SamplerSpec
from flowgrpo_rc.models.base import FlowModel, Schedule
from flowgrpo_rc.models.layout import (
    JOINT_ATTENTION,
    check_size,
    decode_picture,
    dynamic_shift,
    run_transformer,
)


class StableDiffusion3(FlowModel):
    """Stable Diffusion 3: two CLIP encoders and, optionally, T5; latents [B, C, H/8, W/8].

    guidance_scale guides on a negative prompt.
    """

    pipeline_class = "StableDiffusion3Pipeline"
    guides_in_one_batch = True
    optional_components = ("text_encoder_3", "tokenizer_3")
    default_target_modules = JOINT_ATTENTION

    def _encode(self, prompts: Sequence[str], *, max_sequence_length: int) -> Conditioning:
        others = {"prompt_2": None, "prompt_3": None, "do_classifier_free_guidance": False}
        embeds, _, pooled, _ = self._stock_encoding(prompts, max_sequence_length, **others)
        return Conditioning(embeds=embeds, pooled=pooled)

    def blank_conditioning(self, count: int, spec: SamplerSpec) -> Conditioning:
        """Returns T5's tokens behind those of CLIP."""
        length = self.pipeline.tokenizer_max_length + spec.max_sequence_length
        return super().blank_conditioning(count, replace(spec, max_sequence_length=length))

    def check(self, spec: SamplerSpec, key: str) -> None:
        """Refuses sizes that do not fill whole patches, or exceed the position embeddings."""
        multiple = self.pipeline.vae_scale_factor * self.pipeline.patch_size
        largest = self.transformer.config.pos_embed_max_size * multiple
        check_size(spec, key, multiple=multiple, largest=largest)

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

    def _predict(
        self, transformer: ModelMixin, x: Tensor, at: Tensor, text: Conditioning, spec: SamplerSpec
    ) -> Tensor:
        return run_transformer(transformer, x, text, timestep=at)

    def _decode(self, latents: Tensor, spec: SamplerSpec) -> Tensor:
        config = self.pipeline.vae.config
        return decode_picture(self.pipeline, latents / config.scaling_factor + config.shift_factor)
