"""Z-Image and Z-Image-Turbo (https://arxiv.org/abs/2511.22699).

Turbo is distilled: it makes a picture in eight steps and takes no guidance. Reinforcement learning
then trains the few steps that users take, so `num_inference_steps` and `guidance_scale` should be
theirs.

Legend: B samples, C latent channels, H and W height and width of a picture in pixels.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from flowgrpo_rc.batch import Conditioning, SamplerSpec
from flowgrpo_rc.models.base import FlowModel, Schedule
from flowgrpo_rc.models.layout import check_size, decode_picture, dynamic_shift, input_dtype


class ZImage(FlowModel):
    """Z-Image: Qwen3 gives the tokens; latents [B, C, H/8, W/8].

    Prompts keep their own length, so their tokens have a mask. guidance_scale guides on a negative
    prompt. It counts from 0, which is no guidance: the velocity is c + guidance_scale (c - u).
    """

    pipeline_class = "ZImagePipeline"
    thinking = True
    keeps_length = True
    unguided_scale = 0.0
    vae_in_bf16 = True
    min_sequence_length = 1
    text_width_key = "cap_feat_dim"
    default_target_modules = (
        "attention.to_k",
        "attention.to_out.0",
        "attention.to_q",
        "attention.to_v",
    )

    def check(self, spec: SamplerSpec, key: str) -> None:
        """Refuses sizes that do not fill whole patches."""
        check_size(spec, key, multiple=2 * self.pipeline.vae_scale_factor)

    def _encode(self, prompts: Sequence[str], *, max_sequence_length: int) -> Conditioning:
        embeds, _ = self._stock_encoding(
            prompts, max_sequence_length, do_classifier_free_guidance=False
        )
        lengths = torch.tensor([len(tokens) for tokens in embeds], device=self.device)
        padded = pad_sequence(embeds, batch_first=True)
        positions = torch.arange(padded.shape[1], device=self.device)
        return Conditioning(embeds=padded, mask=positions < lengths.unsqueeze(1)).counted()

    def schedule(self, spec: SamplerSpec) -> Schedule:
        """Returns evenly spaced sigmas from 1 to 1 / num_inference_steps, shifted."""
        scheduler = self.scheduler
        _, rows, columns = self.latent_shape(spec)
        steps = spec.num_inference_steps
        scheduler.set_timesteps(
            # In fp32, as the stock pipeline spaces them.
            sigmas=torch.linspace(1.0, 1 / steps, steps).tolist(),
            mu=dynamic_shift(scheduler, (rows // 2) * (columns // 2)),
            device=self.device,
        )
        return Schedule(scheduler.sigmas.clone(), scheduler.timesteps.clone())

    def velocity(
        self,
        transformer: nn.Module,
        latents: Tensor,
        timesteps: Tensor,
        conditioning: Conditioning,
        negative: Conditioning | None,
        spec: SamplerSpec,
    ) -> Tensor:
        """Predicts the velocity by a transformer that takes lists and predicts image - noise."""
        dtype = input_dtype(transformer)
        prompts = _rows(conditioning, dtype)
        if negative is not None:
            latents = torch.cat([latents] * 2)
            timesteps = torch.cat([timesteps] * 2)
            prompts = prompts + _rows(negative, dtype)
        predicted = transformer(
            list(latents.to(dtype).unsqueeze(2).unbind()),
            (1000 - timesteps) / 1000,
            prompts,
            return_dict=False,
        )[0]
        towards_image = torch.stack(predicted).squeeze(2).float()
        if negative is None:
            return -towards_image
        guided, unguided = towards_image.chunk(2)
        return -(guided + spec.guidance_scale * (guided - unguided))

    def _decode(self, latents: Tensor, spec: SamplerSpec) -> Tensor:
        vae = self.pipeline.vae
        scaled = latents.to(vae.dtype) / vae.config.scaling_factor + vae.config.shift_factor
        return decode_picture(self.pipeline, scaled)


def _rows(text: Conditioning, dtype: torch.dtype) -> list[Tensor]:
    """Returns the tokens of each prompt, without its padding, [L, E] each."""
    rows = list(text.embeds.to(dtype).unbind())
    if text.mask is None:
        return rows
    lengths = text.counted().lengths
    return [row[:length] for row, length in zip(rows, lengths, strict=True)]
