"""Small random checkpoints of the real classes: one for every adapter, and variants.

A new adapter gets an entry in `TINY`, and the conformance tests run on it.
"""

from __future__ import annotations

import inspect
import io
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bundled_models import tiny_sd3
from diffusers import (
    AutoencoderDC,
    AutoencoderKLFlux2,
    AutoencoderKLQwenImage,
    AutoencoderKLWan,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Transformer2DModel,
    FluxPipeline,
    FluxTransformer2DModel,
    QwenImageEditPlusPipeline,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    SanaPipeline,
    SanaTransformer2DModel,
    SchedulerMixin,
    SD3Transformer2DModel,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from PIL import Image
from support.image_rollouts import make_spec
from transformers import (
    AddedToken,
    CLIPTextModel,
    Gemma2Config,
    Gemma2Model,
    GemmaTokenizer,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
    UMT5Config,
    UMT5EncoderModel,
)

from flowgrpo_rc.batch import SamplerSpec

_WIDTH = 32  # of transformers: two heads of 16
_LATENT_CHANNELS = 4  # of video VAEs
_TRANSFORMER = {"attention_head_dim": _WIDTH // 2, "num_attention_heads": 2}
_ENCODER = {
    "hidden_size": _WIDTH,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
_SIZES = (((98, 70), (64, 64)), ((66, 80),))
_FEW_TOKENS = {"base_image_seq_len": 8, "max_image_seq_len": 64}
_VIDEO_VAE = {
    "base_dim": 8,
    "z_dim": _LATENT_CHANNELS,
    "dim_mult": [1, 1, 1, 1],
    "num_res_blocks": 1,
    "latents_mean": [-0.5, 0.0, 0.5, 1.0],
    "latents_std": [2.0, 1.5, 1.0, 2.5],
}


@dataclass(frozen=True, kw_only=True)
class Tiny:
    """Says how to make a checkpoint, and how to call it.

    Attributes:
      build: makes the stock pipeline, untrained.
      unguided, guided: the model's own guidance, as `rollout.pipeline` and the stock pipeline call
        it.
      num_frames: of a video.
      image_sizes: width and height of the condition images of the first prompt, then of the second,
        which the model gets at `condition_pixels`.
      stock_latents: makes what the stock pipeline calls its latents from ours.
      packages: those that the pipeline needs besides.
    """

    build: Callable[[], DiffusionPipeline]
    unguided: Mapping[str, float]
    guided: Mapping[str, float]
    num_frames: int | None = None
    image_sizes: tuple[tuple[tuple[int, int], ...], ...] = ()
    condition_pixels: int = 1024 * 1024
    packages: tuple[str, ...] = ()
    stock_latents: Callable[[Any, torch.Tensor], torch.Tensor] = lambda model, latents: latents

    def images(self, prompt: int) -> tuple[bytes, ...]:
        """Condition images of one of the prompts: noise, as PNG files."""
        sizes = self.image_sizes[prompt % len(self.image_sizes)] if self.image_sizes else ()
        rng = np.random.default_rng(prompt)
        return tuple(
            png(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)) for width, height in sizes
        )

    def save(self, folder: Path) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.build().save_pretrained(folder)

    def spec(self, kind: str, guidance: Mapping[str, float], **changes: object) -> SamplerSpec:
        own = {
            "num_inference_steps": 4,
            "num_frames": self.num_frames,
            "condition_images": max(map(len, self.image_sizes), default=0),
            "condition_pixels": self.condition_pixels,
        }
        return make_spec(kind, 4.5, **own | dict(guidance) | changes)


def png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="PNG")
    return file.getvalue()


def stable_diffusion_3(*, scaling_factor: float = 1.5, shift_factor: float = 0.1) -> Any:
    """The bundled architecture with half of its layers."""
    vae = tiny_sd3.autoencoder()
    vae.register_to_config(scaling_factor=scaling_factor, shift_factor=shift_factor)
    pipeline = tiny_sd3.pipeline(vae)
    pipeline.transformer = SD3Transformer2DModel.from_config(
        pipeline.transformer.config, num_layers=2
    )
    return pipeline


euler = partial(FlowMatchEulerDiscreteScheduler, shift=3.0)


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
            joint_attention_dim=tokens.config.d_model,
            pooled_projection_dim=pooled.hidden_size,
            guidance_embeds=guidance_embeds,
            axes_dims_rope=(4, 6, 6),
            **_TRANSFORMER,
        ),
        scheduler=euler(use_dynamic_shifting=guidance_embeds, **_FEW_TOKENS),
        vae=vae,
        text_encoder=CLIPTextModel(pooled),
        tokenizer=clip,
        text_encoder_2=tokens,
        tokenizer_2=t5,
    )


def qwen_tokenizer(template: str, extra: tuple[str, ...] = ()) -> Qwen2Tokenizer:
    """Every word of the template becomes one token, as with the true vocabulary: the pipeline drops
    the first 34, or 64.
    """
    marks = ("<|im_start|>", "<|im_end|>", *extra)
    words = template.replace(marks[0], "").replace(marks[1], "")
    return Qwen2Tokenizer(vocab={"<|endoftext|>": 0}, merges=[]).train_new_from_iterator(
        [words] * 2 + list(string.printable), vocab_size=600, new_special_tokens=list(marks)
    )


def qwen_encoder(tokenizer: Qwen2Tokenizer, **marks: int) -> Qwen2_5_VLForConditionalGeneration:
    """marks: the ids of the tokens that stand for images."""
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "num_heads": 2,
        "intermediate_size": 32,
        "out_hidden_size": _WIDTH,
    }
    return Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            text_config={
                **_ENCODER,
                "num_hidden_layers": 1,
                "vocab_size": len(tokenizer),
                "rope_parameters": rope,
                "bos_token_id": None,
                "eos_token_id": tokenizer.eos_token_id,
                "pad_token_id": tokenizer.pad_token_id,
            },
            vision_config={**vision, "patch_size": 4, "fullatt_block_indexes": [0]},
            **marks,
        )
    )


def qwen_parts() -> dict[str, Any]:
    """Transformer, scheduler and VAE of Qwen-Image and of Qwen-Image-Edit."""
    return {
        "transformer": QwenImageTransformer2DModel(
            in_channels=4 * _LATENT_CHANNELS,
            out_channels=_LATENT_CHANNELS,
            num_layers=2,
            joint_attention_dim=_WIDTH,
            axes_dims_rope=(4, 6, 6),
            **_TRANSFORMER,
        ),
        "scheduler": euler(
            shift=1.0, shift_terminal=0.02, use_dynamic_shifting=True, max_shift=0.9, **_FEW_TOKENS
        ),
        "vae": AutoencoderKLQwenImage(**_VIDEO_VAE),
    }


def qwen_image() -> QwenImagePipeline:
    template = QwenImagePipeline(None, None, None, None, None).prompt_template_encode
    tokenizer = qwen_tokenizer(template)
    encoder = qwen_encoder(tokenizer)
    return QwenImagePipeline(tokenizer=tokenizer, text_encoder=encoder, **qwen_parts())


def qwen_image_edit() -> QwenImageEditPlusPipeline:
    """Its processor of videos, which nothing here uses, needs torchvision."""
    from transformers import Qwen2VLVideoProcessor

    empty = QwenImageEditPlusPipeline(None, None, None, None, None, None)
    marks = ("<|vision_start|>", "<|image_pad|>", "<|video_pad|>", "<|vision_end|>")
    tokenizer = qwen_tokenizer(empty.prompt_template_encode, marks)
    start, image, video, end = tokenizer.convert_tokens_to_ids(list(marks))
    patches = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
    return QwenImageEditPlusPipeline(
        tokenizer=tokenizer,
        text_encoder=qwen_encoder(
            tokenizer,
            image_token_id=image,
            video_token_id=video,
            vision_start_token_id=start,
            vision_end_token_id=end,
        ),
        processor=Qwen2VLProcessor(
            # A few tokens for each image, where the true one has about 200.
            Qwen2VLImageProcessor(size={"shortest_edge": 64, "longest_edge": 1024}, **patches),
            tokenizer,
            Qwen2VLVideoProcessor(**patches),
        ),
        **qwen_parts(),
    )


def flux2_klein(*, is_distilled: bool = False) -> Flux2KleinPipeline:
    """The text encoder has the 27 layers that the pipeline reads, each of them minute."""
    tokenizer = Qwen2Tokenizer(vocab={"<|endoftext|>": 0}, merges=[]).train_new_from_iterator(
        list(string.printable), vocab_size=300, new_special_tokens=["<|im_start|>", "<|im_end|>"]
    )
    tokenizer.chat_template = "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}"
    encoder = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=_WIDTH // 2,
            intermediate_size=16,
            num_hidden_layers=27,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    vae = AutoencoderKLFlux2(
        block_out_channels=(8, 8, 8),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        layers_per_block=1,
        latent_channels=_LATENT_CHANNELS,
        norm_num_groups=4,
        mid_block_add_attention=False,
    )
    vae.bn.running_mean.uniform_(-0.5, 0.5)
    vae.bn.running_var.uniform_(0.5, 2.0)
    return Flux2KleinPipeline(
        scheduler=euler(use_dynamic_shifting=True),
        vae=vae,
        text_encoder=encoder,
        tokenizer=tokenizer,
        transformer=Flux2Transformer2DModel(
            in_channels=4 * _LATENT_CHANNELS,
            num_layers=1,
            num_single_layers=1,
            joint_attention_dim=3 * _WIDTH // 2,
            timestep_guidance_channels=32,
            axes_dims_rope=(4, 4, 4, 4),
            guidance_embeds=False,
            **_TRANSFORMER,
        ),
        is_distilled=is_distilled,
    )


def z_image() -> ZImagePipeline:
    tokenizer = Qwen2Tokenizer(
        vocab={c: i for i, c in enumerate(["<|endoftext|>", *string.printable])}, merges=[]
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = "<|im_start|>{{ messages[0].content }}<|im_end|>"
    encoder = Qwen3Model(
        Qwen3Config(
            vocab_size=len(tokenizer),
            num_hidden_layers=2,  # the tokens are taken from the last layer but one
            head_dim=_WIDTH // 2,
            **_ENCODER,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    vae = tiny_sd3.autoencoder()
    vae.register_to_config(scaling_factor=0.4, shift_factor=0.1)
    transformer = ZImageTransformer2DModel(
        in_channels=tiny_sd3.LATENT_CHANNELS,
        dim=_WIDTH,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=_WIDTH,
        axes_dims=[4, 6, 6],
        axes_lens=[64, 32, 32],
    )
    return ZImagePipeline(
        scheduler=euler(use_dynamic_shifting=True, **_FEW_TOKENS),
        vae=vae,
        text_encoder=encoder,
        tokenizer=tokenizer,
        transformer=transformer,
    )


def wan(
    *,
    scheduler: Callable[[], SchedulerMixin] = euler,
    expand_timesteps: bool = False,
    boundary_ratio: float | None = None,
) -> WanPipeline:
    """boundary_ratio: of a pipeline with two transformers; None: it has one."""
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
        vae=AutoencoderKLWan(**_VIDEO_VAE),
        scheduler=scheduler(),
        transformer=_wan_transformer(),
        transformer_2=None if boundary_ratio is None else _wan_transformer(),
        boundary_ratio=boundary_ratio,
        expand_timesteps=expand_timesteps,
    )


def _wan_transformer() -> WanTransformer3DModel:
    return WanTransformer3DModel(
        in_channels=_LATENT_CHANNELS,
        out_channels=_LATENT_CHANNELS,
        text_dim=_WIDTH,
        freq_dim=32,
        ffn_dim=64,
        num_layers=2,
        rope_max_seq_len=32,
        **_TRANSFORMER,
    )


def sana() -> SanaPipeline:
    marks = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "▁"]
    tokenizer = GemmaTokenizer(vocab={c: i for i, c in enumerate([*marks, *string.printable])})
    # Each line of what Gemma is told before a prompt becomes one token.
    told = inspect.signature(SanaPipeline.__call__).parameters["complex_human_instruction"].default
    tokenizer.add_tokens([AddedToken(line, normalized=False) for line in told])
    encoder = Gemma2Model(
        Gemma2Config(
            vocab_size=len(tokenizer),
            num_hidden_layers=1,
            head_dim=_WIDTH // 2,
            **_ENCODER,
        )
    )
    blocks = {
        "block_out_channels": (32, 32),
        "layers_per_block": (1, 1),
        "qkv_multiscales": ((), (5,)),
    }
    return SanaPipeline(
        tokenizer=tokenizer,
        text_encoder=encoder,
        vae=AutoencoderDC(
            latent_channels=_LATENT_CHANNELS,
            attention_head_dim=_WIDTH // 2,
            **{
                f"{side}_{name}": value
                for side in ("encoder", "decoder")
                for name, value in blocks.items()
            },
            encoder_block_types=("ResBlock", "EfficientViTBlock"),
            decoder_block_types=("ResBlock", "EfficientViTBlock"),
            scaling_factor=0.4,
        ),
        transformer=SanaTransformer2DModel(
            in_channels=_LATENT_CHANNELS,
            out_channels=_LATENT_CHANNELS,
            num_layers=2,
            num_cross_attention_heads=2,
            cross_attention_head_dim=_WIDTH // 2,
            cross_attention_dim=_WIDTH,
            caption_channels=_WIDTH,
            sample_size=16,
            **_TRANSFORMER,
        ),
        scheduler=euler(),
    )


# The scheduler of Wan's checkpoints at order 1: its steps are Euler's.
one_step_unipc = partial(
    UniPCMultistepScheduler,
    disable_corrector=list(range(100)),
    prediction_type="flow_prediction",
    use_flow_sigmas=True,
    flow_shift=3.0,
    solver_order=1,
)

_FLUX = Tiny(
    build=partial(flux, guidance_embeds=True),
    unguided={"guidance_scale": 1.0},
    guided={"guidance_scale": 3.5, "true_cfg_scale": 2.0},
)
_KLEIN = Tiny(
    build=flux2_klein,
    unguided={"guidance_scale": 1.0},
    guided={"guidance_scale": 4.0},
    stock_latents=lambda model, latents: model.vae_latents(latents),
)
_WAN = Tiny(
    build=wan, unguided={"guidance_scale": 1.0}, guided={"guidance_scale": 5.0}, num_frames=5
)
# Four steps of the tiny scheduler stand at 1000, 857, 602 and 9: two for each transformer.
_WAN_TWO_STAGE = replace(
    _WAN,
    build=partial(wan, boundary_ratio=0.8),
    guided={"guidance_scale": 5.0, "guidance_scale_2": 3.0},
)
_Z_IMAGE = Tiny(build=z_image, unguided={"guidance_scale": 0.0}, guided={"guidance_scale": 4.0})

# By what `FlowModel.serves` returns, as adapters are found.
TINY = {
    "StableDiffusion3Pipeline": Tiny(
        build=stable_diffusion_3, unguided={"guidance_scale": 1.0}, guided={"guidance_scale": 4.5}
    ),
    "FluxPipeline": _FLUX,
    "Flux2KleinPipeline": _KLEIN,
    "QwenImageEditPlusPipeline": Tiny(
        build=qwen_image_edit,
        unguided={"true_cfg_scale": 1.0},
        guided={"true_cfg_scale": 4.0},
        image_sizes=_SIZES,
        condition_pixels=64 * 96,
        packages=("torchvision",),
    ),
    "QwenImagePipeline": Tiny(
        build=qwen_image, unguided={"true_cfg_scale": 1.0}, guided={"true_cfg_scale": 4.0}
    ),
    "SanaPipeline": Tiny(
        build=sana, unguided={"guidance_scale": 1.0}, guided={"guidance_scale": 4.5}
    ),
    "WanPipeline": _WAN,
    "WanPipeline+transformer_2": _WAN_TWO_STAGE,
    "ZImagePipeline": _Z_IMAGE,
}

# Checkpoints of the same classes that take another way through their adapter.
VARIANTS = {
    "flux_schnell": Tiny(
        build=partial(flux, guidance_embeds=False),
        unguided={"guidance_scale": 1.0},
        guided={"guidance_scale": 1.0, "true_cfg_scale": 2.0},
    ),
    # Not all of its images are multiples of what a token covers.
    "flux2_klein_edits": replace(_KLEIN, image_sizes=_SIZES),
    "wan_ti2v": replace(_WAN, build=partial(wan, expand_timesteps=True)),
}
