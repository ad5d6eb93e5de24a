"""Stable Diffusion 3 and 3.5 in vLLM-Omni."""

from __future__ import annotations

from torch import Tensor
from vllm_omni.diffusion.models.sd3.pipeline_sd3 import StableDiffusion3Pipeline

from flowgrpo_rc.rollout.vllm_omni.recorder import Recorder


class RolloutStableDiffusion3(Recorder, StableDiffusion3Pipeline):
    """Stable Diffusion 3 with the trainer's denoising loop."""

    def encode(self, texts: list[str], max_sequence_length: int) -> dict[str, Tensor]:
        """Returns the conditioning of the texts, by the names of the pipeline's parameters."""
        embeds, pooled = self.encode_prompt(
            texts, None, None, max_sequence_length=max_sequence_length
        )
        return {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}

    def diffuse(
        self,
        latents: Tensor,
        timesteps: Tensor,
        prompt_embeds: Tensor,
        pooled_prompt_embeds: Tensor,
        negative_prompt_embeds: Tensor | None,
        negative_pooled_prompt_embeds: Tensor | None,
        do_true_cfg: bool,
        guidance_scale: float,
        cfg_normalize: bool = False,
    ) -> Tensor:
        """Denoises by the trainer's loop; replaces vLLM-Omni's, with its parameters."""
        texts = {
            "encoder_hidden_states": (prompt_embeds, negative_prompt_embeds),
            "pooled_projections": (pooled_prompt_embeds, negative_pooled_prompt_embeds),
        }
        return self._walk(do_true_cfg, guidance_scale, cfg_normalize, texts)
