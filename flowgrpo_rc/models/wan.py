"""Wan 2.1 and 2.2, text to video (https://arxiv.org/abs/2503.20314).

Legend: B samples, C latent channels, H and W height and width of a picture in pixels.
"""

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from diffusers import ModelMixin
from torch import Tensor

from flowgrpo_rc.batch import Conditioning, SamplerSpec
from flowgrpo_rc.models.base import FlowModel, Schedule
from flowgrpo_rc.models.layout import (
    SELF_AND_CROSS_ATTENTION,
    check_size,
    run_transformer,
    unscaled,
)
from flowgrpo_rc.plugins import refuse


class Wan(FlowModel):
    """Wan: UMT5 gives the tokens; latents [B, C, 1 + (frames - 1) / 4, H/8, W/8] of a video VAE.

    Prompts are padded to max_sequence_length. Checkpoints come with UniPC, a multistep solver whose
    steps are no Gaussians. Its sigmas and timesteps are kept, and the steps are Euler's.
    """

    pipeline_class = "WanPipeline"
    takes_flow_solvers = True
    makes = "video"
    text_width_key = "text_dim"
    default_target_modules = SELF_AND_CROSS_ATTENTION
    unsupported_components: ClassVar[Mapping[str, str]] = {
        "transformer_2": "model.adapter=wan trains one transformer; drop it"
    }

    def check(self, spec: SamplerSpec, key: str) -> None:
        """Refuses sizes and frames that do not fill patches."""
        pipeline = self.pipeline
        _, rows, columns = self.transformer.config.patch_size
        assert rows == columns, "Wan's patches are square"
        check_size(spec, key, multiple=math.lcm(16, rows * pipeline.vae_scale_factor_spatial))
        assert spec.num_frames is not None, "a video has frames"
        factor = pipeline.vae_scale_factor_temporal
        made = f"this model makes multiples of {factor} and 1 more: 1, {1 + factor}, ..."
        refuse(
            (spec.num_frames % factor != 1, f"{key}.num_frames={spec.num_frames}: {made}"),
        )
        ratio = pipeline.config.boundary_ratio
        has_two = len(self.networks) == 2
        refuse(
            (
                ratio is not None and not has_two,
                f"boundary_ratio={ratio} and no transformer_2 for the timesteps below it; give a "
                "model.path with both transformers",
            ),
            (
                ratio is None and has_two,
                "a transformer_2 and no boundary_ratio, so the stock pipeline would never use it; "
                "set boundary_ratio, or set transformer_2 to [null, null]",
            ),
            about="model.path: its model_index.json has ",
        )

    def _encode(self, prompts: Sequence[str], *, max_sequence_length: int) -> Conditioning:
        embeds, _ = self._stock_encoding(
            prompts, max_sequence_length, do_classifier_free_guidance=False
        )
        return Conditioning(embeds=embeds)

    def latent_shape(self, spec: SamplerSpec) -> tuple[int, ...]:
        """Returns channels, frames, height and width of the latents."""
        assert spec.num_frames is not None, "a video has frames"
        channels = self.transformer.config.in_channels
        frames = 1 + (spec.num_frames - 1) // self.pipeline.vae_scale_factor_temporal
        factor = self.pipeline.vae_scale_factor_spatial
        return channels, frames, spec.height // factor, spec.width // factor

    def schedule(self, spec: SamplerSpec) -> Schedule:
        """Returns the sigmas and timesteps of the checkpoint's scheduler, starting at 1."""
        scheduler = self.scheduler
        scheduler.set_timesteps(spec.num_inference_steps, device=self.device)
        sigmas = scheduler.sigmas.to(self.device)
        # UniPC takes a logarithm of 1 - sigma, and so starts 1e-6 below 1.
        return Schedule(torch.where(sigmas > 1 - 2e-6, 1.0, sigmas), scheduler.timesteps.float())

    def _predict(
        self, transformer: ModelMixin, x: Tensor, at: Tensor, text: Conditioning, spec: SamplerSpec
    ) -> Tensor:
        if self.pipeline.config.expand_timesteps:
            # The transformer of Wan 2.2 TI2V takes a timestep for each token.
            num_tokens = x[0, 0].numel() // math.prod(self.transformer.config.patch_size)
            at = at.unsqueeze(1).expand(-1, num_tokens)
        return run_transformer(transformer, x, text, timestep=at)

    def _decode(self, latents: Tensor, spec: SamplerSpec) -> Tensor:
        vae = self.pipeline.vae
        decoded = vae.decode(unscaled(latents.to(vae.dtype), vae), return_dict=False)[0]
        return self.pipeline.video_processor.postprocess_video(decoded, output_type="pt")
