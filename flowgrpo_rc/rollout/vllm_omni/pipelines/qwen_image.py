"""Qwen-Image in vLLM-Omni."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor
from vllm_omni.diffusion.models.qwen_image.pipeline_qwen_image import QwenImagePipeline

from flowgrpo_rc.rollout.vllm_omni.recorder import TrueCfgRecorder


class RolloutQwenImage(TrueCfgRecorder, QwenImagePipeline):
    """Qwen-Image with the trainer's denoising loop."""

    renamed: ClassVar[Mapping[str, str]] = {".to_out.0": ".to_out"}

    def encode(self, texts: list[str], max_sequence_length: int) -> dict[str, Tensor]:
        """Returns the conditioning of the texts, by the names of the pipeline's parameters."""
        embeds, mask = self.encode_prompt(texts, max_sequence_length=max_sequence_length)
        # The encoder has a precision of its own.
        return {"prompt_embeds": embeds.to(self.od_config.dtype), "prompt_embeds_mask": mask}

    def diffuse(
        self,
        prompt_embeds: Tensor,
        prompt_embeds_mask: Tensor,
        negative_prompt_embeds: Tensor | None,
        negative_prompt_embeds_mask: Tensor | None,
        latents: Tensor,
        img_shapes: Any,
        txt_seq_lens: Any,
        negative_txt_seq_lens: Any,
        timesteps: Tensor,
        do_true_cfg: bool,
        guidance: Tensor | None,
        true_cfg_scale: float,
        image_latents: None = None,
        cfg_normalize: bool = True,
        additional_transformer_kwargs: Mapping[str, Any] | None = None,
    ) -> Tensor:
        """Denoises by the trainer's loop; replaces vLLM-Omni's, with its parameters."""
        texts = {
            "encoder_hidden_states": (prompt_embeds, negative_prompt_embeds),
            "encoder_hidden_states_mask": (prompt_embeds_mask, negative_prompt_embeds_mask),
            "txt_seq_lens": (txt_seq_lens, negative_txt_seq_lens),
        }
        shared = {"guidance": guidance, "img_shapes": img_shapes}
        shared |= additional_transformer_kwargs or {}
        return self._walk(do_true_cfg, true_cfg_scale, cfg_normalize, texts, shared)
