"""What several adapters share: sizes, schedules, packed latents, and pictures out of the VAE.

Legend: B samples, C latent channels, H and W latent height and width, F latent frames.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from diffusers import DiffusionPipeline, ModelMixin, SchedulerMixin
from torch import Tensor

from flowgrpo_rc.batch import Conditioning, SamplerSpec
from flowgrpo_rc.models.base import FlowModel, Schedule
from flowgrpo_rc.plugins import refuse

# Linear layers that get a LoRA by default: where text and picture attend to each other, and where
# the picture attends to itself and then to the text.
JOINT_ATTENTION = (
    "attn.add_k_proj",
    "attn.add_q_proj",
    "attn.add_v_proj",
    "attn.to_add_out",
    "attn.to_k",
    "attn.to_out.0",
    "attn.to_q",
    "attn.to_v",
)
SELF_AND_CROSS_ATTENTION = tuple(
    f"{attention}.{layer}"
    for attention in ("attn1", "attn2")
    for layer in ("to_k", "to_out.0", "to_q", "to_v")
)


def input_dtype(transformer: ModelMixin) -> torch.dtype:
    """Returns `transformer.dtype`, without walking through all modules at every call."""
    in_fp32 = transformer._keep_in_fp32_modules or ()
    return next(
        parameter.dtype
        for name, parameter in transformer.named_parameters()
        if parameter.is_floating_point() and not any(layer in name for layer in in_fp32)
    )


def run_transformer(
    transformer: ModelMixin, x: Tensor, text: Conditioning, **inputs: object
) -> Tensor:
    """Runs a transformer on states and embeddings, cast to its precision; returns fp32.

    Timesteps and guidance among the other `inputs` stay in fp32, since 16 bits would round them.
    """
    dtype = input_dtype(transformer)
    if text.pooled is not None:
        inputs["pooled_projections"] = text.pooled.to(dtype)
    predicted: Tensor = transformer(
        hidden_states=x.to(dtype),
        encoder_hidden_states=text.embeds.to(dtype),
        return_dict=False,
        **inputs,
    )[0]
    return predicted.float()


def check_size(spec: SamplerSpec, key: str, *, multiple: int, largest: int | None = None) -> None:
    """Raises ValueError unless height and width of section `key`, in pixels, fill patches and fit
    the model.
    """
    limit = "" if largest is None else f" up to {largest}"
    for name, size in (("height", spec.height), ("width", spec.width)):
        fits = size % multiple == 0 and 0 < size <= (largest or size)
        fault = f"{key}.{name}={size}: this model makes multiples of {multiple}{limit} pixels"
        refuse((not fits, fault))


def check_unguided(spec: SamplerSpec, key: str, why: str) -> None:
    """Raises ValueError for a guidance_scale of section `key` that the checkpoint does not take."""
    setting = f"{key}.guidance_scale={spec.guidance_scale}"
    refuse((spec.guidance_scale != 1, f"{setting} has no effect: this checkpoint {why}"))


def in_groups(groups: Sequence[Tensor], evaluate: Callable[[int, Tensor], Tensor]) -> Tensor:
    """Evaluates rows group by group, and puts each row of the results at its place.

    The same rows may have other last bits than in one batch.

    Args:
      groups: indices of the rows of each group, int64; together they hold each row once.
      evaluate: returns a group's results, [rows, ...], by its number and its rows.
    """
    results = torch.cat([evaluate(number, rows) for number, rows in enumerate(groups)])
    return results[torch.cat(list(groups)).argsort()]


def dynamic_shift(scheduler: SchedulerMixin, num_tokens: int) -> float:
    """Computes `mu` of the scheduler's time shift for a picture of so many tokens.

        mu = base_shift + slope (num_tokens - base_image_seq_len)

    slope is that of the line through (base_image_seq_len, base_shift) and (max_image_seq_len,
    max_shift), two points of the scheduler's config.

    See "Scaling Rectified Flow Transformers for High-Resolution Image Synthesis",
    https://arxiv.org/abs/2403.03206, on shifting the timesteps by resolution.
    """
    config = scheduler.config
    length = config.max_image_seq_len - config.base_image_seq_len
    slope = (config.max_shift - config.base_shift) / length
    # Evaluated as the stock pipelines do, to get their bits.
    return float(num_tokens * slope + (config.base_shift - slope * config.base_image_seq_len))


def shifted_schedule(
    scheduler: SchedulerMixin, num_steps: int, mu: float, device: torch.device
) -> Schedule:
    """Returns evenly spaced sigmas from 1 to 1 / num_steps, shifted in time by `mu`."""
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / num_steps, num_steps), mu=mu, device=device)
    return Schedule(scheduler.sigmas.clone(), scheduler.timesteps.clone())


def unpack(latents: Tensor, rows: int, columns: int) -> Tensor:
    """Turns 2 x 2 patches, [B, rows * columns, 4 C], into latents, [B, C, 2 rows, 2 columns]."""
    patches = latents.unflatten(1, (rows, columns)).unflatten(-1, (-1, 2, 2))
    return patches.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)


def unscaled(latents: Tensor, vae: ModelMixin) -> Tensor:
    """Takes the normalisation of each channel back, [B, C, F, H, W], before a video VAE decodes."""
    mean, std = (
        torch.tensor(values).reshape(1, vae.config.z_dim, 1, 1, 1).to(latents)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    # Divided by 1 / std as the stock pipelines do, to get their bits.
    return latents / (1.0 / std) + mean


def decode_picture(pipeline: DiffusionPipeline, latents: Tensor) -> Tensor:
    """Decodes latents in the scale of the VAE, [B, C, H, W], to pictures with values in [0, 1]."""
    vae = pipeline.vae
    decoded = vae.decode(latents.to(vae.dtype), return_dict=False)[0]
    return pipeline.image_processor.postprocess(decoded, output_type="pt")


class PackedModel(FlowModel):
    """A flow model of 2 x 2 patches as tokens, [B, H/16 * W/16, 64], with evenly spaced sigmas."""

    def check(self, spec: SamplerSpec, key: str) -> None:
        """Refuses sizes that do not fill whole patches."""
        check_size(spec, key, multiple=2 * self.pipeline.vae_scale_factor)

    def latent_shape(self, spec: SamplerSpec) -> tuple[int, ...]:
        """Returns one token for each patch of 2 x 2 latents, with all their channels."""
        rows, columns = self._patches(spec)
        return rows * columns, self.transformer.config.in_channels

    def schedule(self, spec: SamplerSpec) -> Schedule:
        """Returns evenly spaced sigmas, shifted for the number of tokens."""
        num_tokens, _ = self.latent_shape(spec)
        mu = dynamic_shift(self.scheduler, num_tokens)
        return shifted_schedule(self.scheduler, spec.num_inference_steps, mu, self.device)

    def _patches(self, spec: SamplerSpec) -> tuple[int, int]:
        """Returns rows and columns of the image's tokens."""
        side = 2 * self.pipeline.vae_scale_factor
        return spec.height // side, spec.width // side

    def _unpacked(self, latents: Tensor, spec: SamplerSpec) -> Tensor:
        """Returns tokens as a picture of latents, [B, 16, H/8, W/8]."""
        return unpack(latents, *self._patches(spec))
