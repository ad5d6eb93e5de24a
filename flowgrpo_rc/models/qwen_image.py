"""Qwen-Image (https://arxiv.org/abs/2508.02324).

Legend: B samples, H and W height and width of a picture in pixels.
"""

from collections.abc import Sequence

import torch
from diffusers import ModelMixin
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from flowgrpo_rc.batch import Conditioning, SamplerSpec
from flowgrpo_rc.models.layout import JOINT_ATTENTION, PackedModel, run_transformer, unscaled


class QwenFamily(PackedModel):
    """Does what Qwen-Image and Qwen-Image-Edit share; latents [B, H/16 * W/16, 64], packed.

    Prompts keep their own length, so their tokens have a mask. true_cfg_scale guides on a negative
    prompt.
    """

    cfg_key = "true_cfg_scale"
    masks_text = True
    pads_to_longest = True
    vae_in_bf16 = True
    max_sequence_length = 1024
    default_target_modules = (
        *JOINT_ATTENTION,
        "img_mlp.net.0.proj",
        "img_mlp.net.2",
        "txt_mlp.net.0.proj",
        "txt_mlp.net.2",
    )

    def _predict(
        self, transformer: ModelMixin, x: Tensor, at: Tensor, text: Conditioning, spec: SamplerSpec
    ) -> Tensor:
        sizes = text.image_sizes[0] if text.image_sizes else ()
        shapes = [(1, *size) for size in (self._patches(spec), *sizes)]
        tokens = x if text.images is None else torch.cat([x, text.images], dim=1)
        predicted = run_transformer(
            transformer,
            tokens,
            text,
            timestep=at / 1000,
            encoder_hidden_states_mask=text.mask,
            img_shapes=[shapes] * len(x),
        )
        return predicted[:, : x.shape[1]]

    def _combine(self, guided: Tensor, unguided: Tensor, spec: SamplerSpec) -> Tensor:
        combined = super()._combine(guided, unguided, spec)
        # Guidance makes the velocity of a token longer; the stock pipeline takes that back.
        return combined * (guided.norm(dim=-1, keepdim=True) / combined.norm(dim=-1, keepdim=True))

    def _decode(self, latents: Tensor, spec: SamplerSpec) -> Tensor:
        vae = self.pipeline.vae
        frames = self._unpacked(latents, spec).unsqueeze(2).to(vae.dtype)
        decoded = vae.decode(unscaled(frames, vae), return_dict=False)[0][:, :, 0]
        return self.pipeline.image_processor.postprocess(decoded, output_type="pt")


class QwenImage(QwenFamily):
    """Qwen-Image: Qwen2.5-VL gives the tokens of text."""

    pipeline_class = "QwenImagePipeline"
    keeps_length = True

    def templated(self, tokenizer: PreTrainedTokenizerBase, text: str) -> str:
        """Returns a prompt behind what Qwen2.5-VL is told before each."""
        return str(self.pipeline.prompt_template_encode.format(text))

    def most_tokens(self, tokenizer: PreTrainedTokenizerBase, spec: SamplerSpec) -> int:
        """Counts the tokens of what it is told, which are dropped from the embeddings."""
        return spec.max_sequence_length + int(self.pipeline.prompt_template_encode_start_idx)

    def _encode(self, prompts: Sequence[str], *, max_sequence_length: int) -> Conditioning:
        embeds, mask = self._stock_encoding(prompts, max_sequence_length)
        return Conditioning(embeds=embeds, mask=None if mask is None else mask.bool())
