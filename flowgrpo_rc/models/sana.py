"""Sana 1.0 and 1.5 (https://arxiv.org/abs/2410.10629).

Legend: B samples, C latent channels, H and W height and width of a picture in pixels.
"""

import inspect
import math
from collections.abc import Sequence

from diffusers import ModelMixin, SanaPipeline
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from flowgrpo_rc.batch import Conditioning, SamplerSpec
from flowgrpo_rc.models.base import FlowModel, Schedule
from flowgrpo_rc.models.layout import (
    SELF_AND_CROSS_ATTENTION,
    check_size,
    decode_picture,
    run_transformer,
)

# What Gemma is told before each prompt, but not before a negative one.
_INSTRUCTION = (
    inspect.signature(SanaPipeline.__call__).parameters["complex_human_instruction"].default
)


class Sana(FlowModel):
    """Sana: Gemma gives the tokens, with a mask; latents [B, C, H/32, W/32].

    guidance_scale guides on a negative prompt. Pictures have the size that is asked for: the stock
    pipeline's use_resolution_binning=False.

    Checkpoints come with DPM-Solver++, a multistep solver whose steps are no Gaussians. Its sigmas
    and timesteps are kept, and the steps are Euler's.
    """

    pipeline_class = "SanaPipeline"
    min_sequence_length = 2
    max_sequence_length = 300
    text_width_key = "caption_channels"
    masks_text = True
    guides_in_one_batch = True
    takes_flow_solvers = True
    default_target_modules = SELF_AND_CROSS_ATTENTION

    def check(self, spec: SamplerSpec, key: str) -> None:
        """Refuses sizes that do not fill patches."""
        side = self.transformer.config.patch_size * self.pipeline.vae_scale_factor
        check_size(spec, key, multiple=math.lcm(32, side))

    def templated(self, tokenizer: PreTrainedTokenizerBase, text: str) -> str:
        """Returns a prompt behind what Gemma is told before each."""
        return "\n".join(_INSTRUCTION) + text

    def most_tokens(self, tokenizer: PreTrainedTokenizerBase, spec: SamplerSpec) -> int:
        """Counts the tokens of what Gemma is told, as the stock pipeline does."""
        instruction = tokenizer(self.templated(tokenizer, "")).input_ids
        return len(instruction) + spec.max_sequence_length - 2

    def _encode_negative(self, prompts: Sequence[str], *, max_sequence_length: int) -> Conditioning:
        return self._encode(prompts, max_sequence_length=max_sequence_length, instruction=None)

    def _encode(
        self,
        prompts: Sequence[str],
        *,
        max_sequence_length: int,
        instruction: list[str] | None = _INSTRUCTION,
    ) -> Conditioning:
        embeds, mask, *_ = self._stock_encoding(
            prompts,
            max_sequence_length,
            do_classifier_free_guidance=False,
            complex_human_instruction=instruction,
        )
        return Conditioning(embeds=embeds, mask=mask.bool())

    def schedule(self, spec: SamplerSpec) -> Schedule:
        """Returns the sigmas and timesteps of the checkpoint's scheduler, starting at 1."""
        scheduler = self.scheduler
        scheduler.set_timesteps(spec.num_inference_steps, device=self.device)
        sigmas = scheduler.sigmas.to(self.device, copy=True)
        # DPM-Solver++ starts at 0.9997, though from pure noise. There the first of ten `sde` steps
        # would have ten times the noise.
        sigmas[0] = 1.0
        return Schedule(sigmas, scheduler.timesteps.float())

    def _predict(
        self, transformer: ModelMixin, x: Tensor, at: Tensor, text: Conditioning, spec: SamplerSpec
    ) -> Tensor:
        timestep = at * transformer.config.timestep_scale
        return run_transformer(
            transformer, x, text, timestep=timestep, encoder_attention_mask=text.mask
        )

    def _decode(self, latents: Tensor, spec: SamplerSpec) -> Tensor:
        vae = self.pipeline.vae
        return decode_picture(self.pipeline, latents.to(vae.dtype) / vae.config.scaling_factor)
