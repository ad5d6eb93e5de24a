"""The components of the tiny Stable Diffusion 3, untrained: tokenizers, encoders, VAE, transformer.

Initial weights come from torch's global generator, so callers seed it first.

Legend: B pictures, H and W height and width in pixels.
"""

from __future__ import annotations

import string

from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)

MAX_TEXT_LENGTH = 16  # tokens of CLIP and, as `max_sequence_length`, of T5
LATENT_CHANNELS = 8

_CLIP_WIDTH = 64
_CLIP_PROJECTION = 32
# SD3 joins both CLIPs by channel and then T5 by token, so T5 is as wide as both CLIPs together.
_JOINT_WIDTH = 2 * _CLIP_WIDTH
_WIDTH = 128
_NUM_HEADS = 4
_PRINTABLE = string.digits + string.ascii_letters + string.punctuation


def clip_tokenizer() -> CLIPTokenizer:
    """Returns CLIP's tokenizer without merges: one token per character, in lower case."""
    characters = string.digits + string.ascii_lowercase + string.punctuation
    tokens = [*characters, *(f"{c}</w>" for c in characters), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=[],
        pad_token="<|endoftext|>",
        model_max_length=MAX_TEXT_LENGTH,
    )


def t5_tokenizer() -> T5Tokenizer:
    """Returns T5's tokenizer over single printable characters; it keeps upper and lower case."""
    tokens = ["<pad>", "</s>", "<unk>", "▁", *_PRINTABLE]
    return T5Tokenizer(
        vocab=[(token, 0.0 if i < 3 else -1.0) for i, token in enumerate(tokens)],
        extra_ids=0,
        model_max_length=MAX_TEXT_LENGTH,
    )


def clip_encoder(tokenizer: CLIPTokenizer) -> CLIPTextModelWithProjection:
    """Returns an untrained CLIP text encoder for the tokenizer."""
    return CLIPTextModelWithProjection(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=_CLIP_WIDTH,
            intermediate_size=2 * _CLIP_WIDTH,
            projection_dim=_CLIP_PROJECTION,
            # SD3 takes the tokens from the last layer but one, the pooled vector from the last.
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=MAX_TEXT_LENGTH,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def t5_encoder(tokenizer: T5Tokenizer) -> T5EncoderModel:
    """Returns an untrained T5 encoder for the tokenizer."""
    return T5EncoderModel(
        T5Config(
            vocab_size=len(tokenizer),
            d_model=_JOINT_WIDTH,
            d_kv=32,
            d_ff=_JOINT_WIDTH,
            num_layers=1,
            num_heads=2,
            dropout_rate=0.0,
            is_encoder_decoder=False,
            use_cache=False,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )


def autoencoder() -> AutoencoderKL:
    """Returns an untrained VAE.

    It encodes pictures [B, 3, H, W] in [-1, 1] to latents [B, 8, H/4, W/4].
    """
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(16, 32, 32),
        layers_per_block=1,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=8,
        sample_size=32,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=False,
    )


def transformer() -> SD3Transformer2DModel:
    """Returns an untrained transformer of four blocks."""
    return SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_layers=4,
        num_attention_heads=_NUM_HEADS,
        attention_head_dim=_WIDTH // _NUM_HEADS,
        caption_projection_dim=_WIDTH,
        joint_attention_dim=_JOINT_WIDTH,
        pooled_projection_dim=2 * _CLIP_PROJECTION,
        pos_embed_max_size=16,
        qk_norm="rms_norm",
    )


def pipeline(vae: AutoencoderKL) -> StableDiffusion3Pipeline:
    """Returns a stock pipeline around a VAE; its other models are untrained."""
    clip = clip_tokenizer()
    t5 = t5_tokenizer()
    pipe = StableDiffusion3Pipeline(
        transformer=transformer(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0),
        vae=vae,
        text_encoder=clip_encoder(clip),
        tokenizer=clip,
        text_encoder_2=clip_encoder(clip),
        tokenizer_2=clip_tokenizer(),
        text_encoder_3=t5_encoder(t5),
        tokenizer_3=t5,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe
