"""FLUX.1 in vLLM-Omni."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm_omni.diffusion.models.flux.pipeline_flux import FluxPipeline

from flowgrpo_rc.rollout.vllm_omni.recorder import TrueCfgRecorder


class RolloutFlux(TrueCfgRecorder, FluxPipeline):
    """FLUX.1 with the trainer's denoising loop."""

    def __init__(self, **options: Any) -> None:
        """Builds vLLM-Omni's pipeline; see there for the options."""
        super().__init__(**options)
        # vLLM-Omni's manager of LoRAs asks for the layers that are fused by this name, and only
        # FLUX.1 calls them otherwise.
        self.transformer.stacked_params_mapping = [
            (fused, name)
            for fused, names in self.transformer.packed_modules_mapping.items()
            for name in names
        ]

    def encode(self, texts: list[str], max_sequence_length: int) -> dict[str, Tensor]:
        """Returns the conditioning of the texts, by the names of the pipeline's parameters."""
        embeds, pooled, _ = self.encode_prompt(texts, None, max_sequence_length=max_sequence_length)
        # CLIP has a precision of its own.
        dtype = self.od_config.dtype
        return {"prompt_embeds": embeds.to(dtype), "pooled_prompt_embeds": pooled.to(dtype)}

    def diffuse(
        self,
        prompt_embeds: Tensor,
        pooled_prompt_embeds: Tensor,
        negative_prompt_embeds: Tensor | None,
        negative_pooled_prompt_embeds: Tensor | None,
        latents: Tensor,
        latent_image_ids: Tensor,
        text_ids: Tensor,
        negative_text_ids: Tensor | None,
        timesteps: Tensor,
        do_true_cfg: bool,
        guidance: Tensor | None,
        true_cfg_scale: float,
        cfg_normalize: bool = False,
    ) -> Tensor:
        """Denoises by the trainer's loop; replaces vLLM-Omni's, with its parameters."""
        texts = {
            "encoder_hidden_states": (prompt_embeds, negative_prompt_embeds),
            "pooled_projections": (pooled_prompt_embeds, negative_pooled_prompt_embeds),
            "txt_ids": (text_ids, negative_text_ids),
        }
        shared = {"guidance": guidance, "img_ids": latent_image_ids}
        return self._walk(do_true_cfg, true_cfg_scale, cfg_normalize, texts, shared)
