"""Small random checkpoints of the real classes: one for every adapter, and variants.

A new adapter gets an entry in `TINY`, and the conformance tests run on it.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    AutoencoderKLWan,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    SchedulerMixin,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from transformers import (
    CLIPTextModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    UMT5Config,
    UMT5EncoderModel,
)

from flowgrpo_rc.assets import tiny_sd3
from flowgrpo_rc.batch import SamplerSpec

_WIDTH = 32  # of transformers: two heads of 16
_LATENT_CHANNELS = 4  # of video VAEs


@dataclass(frozen=True, kw_only=True)
class Tiny:
    """build: the stock pipeline, untrained; unguided, guided: the model's own guidance, as
    `rollout.pipeline` and the stock pipeline call it; num_frames: of a video; steps_are_eulers: the
    checkpoint's own scheduler computes its steps as ours does, and not in another order."""

    build: Callable[[], DiffusionPipeline]
    unguided: Mapping[str, float]
    guided: Mapping[str, float]
    num_frames: int | None = None
    steps_are_eulers: bool = True

    def save(self, folder: Path) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.build().save_pretrained(folder)

    def spec(self, kind: str, guidance: Mapping[str, float], **changes: object) -> SamplerSpec:
        values = {
            "height": 32,
            "width": 64,
            "num_inference_steps": 4,
            "guidance_scale": 4.5,
            "noise_level": 0.7,
            "sde_type": kind,
            "log_prob_convention": "gaussian",
            "max_sequence_length": 16,
            "num_frames": self.num_frames,
            "dtype": "fp32",
        }
        return SamplerSpec(**(values | dict(guidance) | changes))  # type: ignore[arg-type]


def stable_diffusion_3(
    *, scaling_factor: float = 1.5, shift_factor: float = 0.1
) -> StableDiffusion3Pipeline:
    """The bundled architecture with half of its layers."""
    vae = tiny_sd3.autoencoder()
    vae.register_to_config(scaling_factor=scaling_factor, shift_factor=shift_factor)
    pipeline = tiny_sd3.pipeline(vae)
    pipeline.transformer = SD3Transformer2DModel.from_config(
        pipeline.transformer.config, num_layers=2
    )
    return pipeline


def flux(*, guidance_embeds: bool) -> FluxPipeline:
    clip = tiny_sd3.clip_tokenizer()
    t5 = tiny_sd3.t5_tokenizer()
    pooled = tiny_sd3.clip_encoder(clip).config
    tokens = tiny_sd3.t5_encoder(t5)
    vae = tiny_sd3.autoencoder()
    vae.register_to_config(scaling_factor=0.4, shift_factor=0.1)
    return FluxPipeline(
        transformer=FluxTransformer2DModel(
            in_channels=4 * tiny_sd3.LATENT_CHANNELS,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=_WIDTH // 2,
            num_attention_heads=2,
            joint_attention_dim=tokens.config.d_model,
            pooled_projection_dim=pooled.hidden_size,
            guidance_embeds=guidance_embeds,
            axes_dims_rope=(4, 6, 6),
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(
            shift=3.0,
            use_dynamic_shifting=guidance_embeds,
            base_image_seq_len=8,
            max_image_seq_len=64,
        ),
        vae=vae,
        text_encoder=CLIPTextModel(pooled),
        tokenizer=clip,
        text_encoder_2=tokens,
        tokenizer_2=t5,
    )


def qwen_image() -> QwenImagePipeline:
    tokenizer = Qwen2Tokenizer(vocab={"<|endoftext|>": 0}, merges=[])
    template = QwenImagePipeline(None, None, None, None, None).prompt_template_encode
    marks = ["<|im_start|>", "<|im_end|>"]
    words = template.replace(marks[0], "").replace(marks[1], "")
    # Every word of the template becomes one token, as with the true vocabulary: the pipeline drops
    # the first 34.
    tokenizer = tokenizer.train_new_from_iterator(
        [words] * 2 + list(string.printable), vocab_size=600, new_special_tokens=marks
    )
    text = {
        "hidden_size": _WIDTH,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "num_heads": 2,
        "intermediate_size": 32,
        "out_hidden_size": _WIDTH,
    }
    encoder = Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            text_config={
                **text,
                "vocab_size": len(tokenizer),
                "num_key_value_heads": 1,
                "rope_parameters": rope,
                "bos_token_id": None,
                "eos_token_id": tokenizer.eos_token_id,
                "pad_token_id": tokenizer.pad_token_id,
            },
            vision_config={**vision, "patch_size": 4, "fullatt_block_indexes": [0]},
        )
    )
    return QwenImagePipeline(
        transformer=QwenImageTransformer2DModel(
            in_channels=4 * _LATENT_CHANNELS,
            out_channels=_LATENT_CHANNELS,
            num_layers=2,
            attention_head_dim=_WIDTH // 2,
            num_attention_heads=2,
            joint_attention_dim=_WIDTH,
            axes_dims_rope=(4, 6, 6),
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(
            shift=1.0,
            shift_terminal=0.02,
            use_dynamic_shifting=True,
            base_image_seq_len=8,
            max_image_seq_len=64,
            max_shift=0.9,
        ),
        vae=AutoencoderKLQwenImage(
            base_dim=8,
            z_dim=_LATENT_CHANNELS,
            dim_mult=[1, 1, 1, 1],
            num_res_blocks=1,
            latents_mean=[-0.5, 0.0, 0.5, 1.0],
            latents_std=[2.0, 1.5, 1.0, 2.5],
        ),
        text_encoder=encoder,
        tokenizer=tokenizer,
    )


def euler() -> FlowMatchEulerDiscreteScheduler:
    return FlowMatchEulerDiscreteScheduler(shift=3.0)


def wan(
    *,
    scheduler: Callable[[], SchedulerMixin] = euler,
    expand_timesteps: bool = False,
) -> WanPipeline:
    tokenizer = tiny_sd3.t5_tokenizer()
    encoder = UMT5EncoderModel(
        UMT5Config(
            vocab_size=len(tokenizer),
            d_model=_WIDTH,
            d_kv=16,
            d_ff=64,
            num_layers=1,
            num_heads=2,
            dropout_rate=0.0,
            is_encoder_decoder=False,
            use_cache=False,
        )
    )
    return WanPipeline(
        tokenizer=tokenizer,
        text_encoder=encoder,
        vae=AutoencoderKLWan(
            base_dim=8,
            z_dim=_LATENT_CHANNELS,
            dim_mult=[1, 1, 1, 1],
            num_res_blocks=1,
            latents_mean=[-0.5, 0.0, 0.5, 1.0],
            latents_std=[2.0, 1.5, 1.0, 2.5],
        ),
        scheduler=scheduler(),
        transformer=WanTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=_WIDTH // 2,
            in_channels=_LATENT_CHANNELS,
            out_channels=_LATENT_CHANNELS,
            text_dim=_WIDTH,
            freq_dim=32,
            ffn_dim=64,
            num_layers=2,
            rope_max_seq_len=32,
        ),
        expand_timesteps=expand_timesteps,
    )


def one_step_unipc() -> UniPCMultistepScheduler:
    """Returns the scheduler of Wan's checkpoints at order 1, without corrector: its steps are
    Euler's.
    """
    return UniPCMultistepScheduler(
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        flow_shift=3.0,
        solver_order=1,
        disable_corrector=list(range(100)),
    )


_FLUX = Tiny(
    build=partial(flux, guidance_embeds=True),
    unguided={"guidance_scale": 1.0},
    guided={"guidance_scale": 3.5, "true_cfg_scale": 2.0},
)
_WAN = Tiny(
    build=wan, unguided={"guidance_scale": 1.0}, guided={"guidance_scale": 5.0}, num_frames=5
)

# By pipeline class, as adapters are found.
TINY = {
    "StableDiffusion3Pipeline": Tiny(
        build=stable_diffusion_3, unguided={"guidance_scale": 1.0}, guided={"guidance_scale": 4.5}
    ),
    "FluxPipeline": _FLUX,
    "QwenImagePipeline": Tiny(
        build=qwen_image, unguided={"true_cfg_scale": 1.0}, guided={"true_cfg_scale": 4.0}
    ),
    "WanPipeline": _WAN,
}

# Checkpoints of the same classes that take another way through their adapter.
VARIANTS = {
    "flux_schnell": Tiny(
        build=partial(flux, guidance_embeds=False),
        unguided={"guidance_scale": 1.0},
        guided={"guidance_scale": 1.0, "true_cfg_scale": 2.0},
    ),
    "wan_unipc": replace(
        _WAN, build=partial(wan, scheduler=one_step_unipc), steps_are_eulers=False
    ),
    "wan_ti2v": replace(_WAN, build=partial(wan, expand_timesteps=True)),
}
