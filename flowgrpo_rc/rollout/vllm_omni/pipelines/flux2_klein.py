"""FLUX.2 klein in vLLM-Omni."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm_omni.diffusion.data import DiffusionOutput
from vllm_omni.diffusion.models.flux2_klein.pipeline_flux2_klein import Flux2KleinPipeline
from vllm_omni.diffusion.worker.request_batch import DiffusionRequestBatch

from flowgrpo_rc.rollout.vllm_omni.recorder import Recorder


class RolloutFlux2Klein(Recorder, Flux2KleinPipeline):
    """FLUX.2 klein with the trainer's loop; takes embeddings, where vLLM-Omni takes one text."""

    def __init__(self, **options: Any) -> None:
        """Builds vLLM-Omni's pipeline; see there for the options."""
        super().__init__(**options)
        self.device = self._execution_device

    def encode(self, texts: list[str], max_sequence_length: int) -> dict[str, Tensor]:
        """Returns the conditioning of the texts, by the names of the pipeline's parameters."""
        embeds, _ = self.encode_prompt(texts, max_sequence_length=max_sequence_length)
        # The encoder has a precision of its own.
        return {"prompt_embeds": embeds.to(self.od_config.dtype)}

    def _sample(self, req: DiffusionRequestBatch) -> list[DiffusionOutput]:
        encoded = DiffusionRequestBatch.collate_prompt_field_map(
            req.prompts, {"prompt_embeds": None, "negative_prompt_embeds": None}
        )
        scale = req.sampling_params_list[0].guidance_scale
        names = ("prompt_embeds", "negative_prompt_embeds")[: 2 if scale > 1 else 1]
        texts = [
            {
                "encoder_hidden_states": encoded[name],
                "txt_ids": self._prepare_text_ids(encoded[name][:1]).to(self.device),
            }
            for name in names
        ]

        def velocity(x: Tensor, at: Tensor) -> Tensor:
            state = {
                "hidden_states": self._pack_latents(x).to(self.od_config.dtype),
                "timestep": at / 1000,
                "img_ids": self._prepare_latent_ids(x[:1]).to(self.device),
            }
            tokens = self._guided(state, texts, scale, normalize=False)
            return tokens.transpose(1, 2).unflatten(2, x.shape[2:])

        self._denoise(velocity)
        return [DiffusionOutput(output=torch.zeros(1)) for _ in req.requests]
