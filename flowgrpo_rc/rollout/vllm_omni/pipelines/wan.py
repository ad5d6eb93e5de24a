"""Wan 2.1 and 2.2 with one transformer in vLLM-Omni."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from diffusers.pipelines.wan.pipeline_wan import prompt_clean
from torch import Tensor
from vllm_omni.diffusion.models.wan2_2.pipeline_wan2_2 import Wan22Pipeline

from flowgrpo_rc.rollout.vllm_omni.recorder import Recorder


class RolloutWan(Recorder, Wan22Pipeline):
    """Wan with the trainer's denoising loop, and so with the schedule of the checkpoint."""

    renamed: ClassVar[Mapping[str, str]] = {
        ".to_out.0": ".to_out",
        ".ffn.net.0.proj": ".ffn.net_0.proj",
        ".ffn.net.2": ".ffn.net_2",
    }

    # vLLM-Omni's leaves entities such as &quot; as they are.
    _prompt_clean = staticmethod(prompt_clean)

    def __init__(self, **options: Any) -> None:
        """Builds vLLM-Omni's pipeline; see there for the options."""
        super().__init__(**options)
        if self.has_transformer_2:
            raise ValueError("vLLM-Omni is given no Wan with two transformers: use diffusers")
        # One transformer does the whole schedule; without a boundary every forward warns.
        self.boundary_ratio = 0.0

    def encode(self, texts: list[str], max_sequence_length: int) -> dict[str, Tensor]:
        """Returns the conditioning of the texts, by the names of the pipeline's parameters."""
        embeds, _ = self.encode_prompt(
            texts,
            do_classifier_free_guidance=False,
            max_sequence_length=max_sequence_length,
            dtype=self.od_config.dtype,
        )
        return {"prompt_embeds": embeds}

    def diffuse(
        self,
        latents: Tensor,
        timesteps: Tensor,
        prompt_embeds: Tensor,
        negative_prompt_embeds: Tensor | None,
        guidance_low: float,
        guidance_high: float,
        boundary_timestep: float | None,
        dtype: torch.dtype,
        attention_kwargs: dict[str, Any],
        latent_condition: None = None,
        first_frame_mask: None = None,
        generator: Any = None,
    ) -> Tensor:
        """Denoises by the trainer's loop; replaces vLLM-Omni's, with its parameters."""
        texts = {"encoder_hidden_states": (prompt_embeds, negative_prompt_embeds)}
        return self._walk(guidance_low > 1, guidance_low, False, texts)
