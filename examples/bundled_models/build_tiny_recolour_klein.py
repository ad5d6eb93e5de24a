"""Builds the bundled editor `tiny_recolour_klein`, its prompts and their pictures from a seed.

    PYTHONPATH=examples python -m bundled_models.build_tiny_recolour_klein [--out DIR]

writes DIR/tiny_recolour_klein (diffusers layout, with build_metrics.json) and DIR/prompts. Without
--out they replace the bundled ones. The VAE is that of `tiny_glyph_sd3`.

The editor learns from timid edits: the word goes a random part of the way from its shade to the one
that is asked for. So it knows how to edit, and stops half-way on average: the rest of the way is
for reinforcement learning.

Legend: B pairs of a batch, L shades, N tokens of a picture, H and W height and width in pixels.
"""

from __future__ import annotations

import argparse
import base64
import copy
import io
import json
import logging
import string
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLFlux2,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Transformer2DModel,
)
from PIL import Image
from torch import Tensor
from transformers import Qwen2Tokenizer, Qwen3Config, Qwen3ForCausalLM

from bundled_models import recolour
from bundled_models.train_vae import to_float
from flowgrpo_rc.assets import ROOT
from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.pictures import read_picture
from flowgrpo_rc.rewards.letter_colour import LetterColour

SEED = 0
NAME = "tiny_recolour_klein"
MAX_TEXT_LENGTH = 8  # tokens of an instruction, its template included
STEPS, BATCH, LR = 800, 16, 2e-3
STOPS = 4  # of an edit on its way from one named shade to the next
LEVELS = np.linspace(20, 170, 3 * STOPS + 1).round().astype(int).tolist()
NUM_SCENES = 200  # of pre-training
NUM_TRAIN, NUM_VAL = 96, 32  # scenes of reinforcement learning, each asked to change once
EVALUATED_STEPS = 8
_WIDTH, _HEADS = 64, 2
_TEXT_WIDTH = 16

logger = logging.getLogger(__name__)


def build(out: Path) -> None:
    """Runs the whole build: prompts, VAE, transformer, saving, evaluation of the saved files.

    Args:
      out: the folder to write to.
    """
    start = time.perf_counter()
    rng = np.random.default_rng(SEED)
    scenes = recolour.draw_scenes(NUM_TRAIN + NUM_VAL, rng)
    write_prompts(out / "prompts", "recolour_train", scenes[:NUM_TRAIN], rng)
    val = write_prompts(out / "prompts", "recolour_val", scenes[NUM_TRAIN:], rng)
    torch.manual_seed(SEED)  # for initial weights
    pixels = _pictures(recolour.draw_scenes(NUM_SCENES, rng))
    pipe = untrained(known_vae(pixels[:64].flatten(0, 1)))
    loss = train_flow(pipe, pixels)
    save(pipe, out / NAME)
    metrics = {
        "seed": SEED,
        "loss": loss,
        "seconds": round(time.perf_counter() - start),
        "val": evaluate_checkpoint(out / NAME, val),
        "num_parameters": sum(p.numel() for p in pipe.transformer.parameters()),
    }
    (out / NAME / "build_metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    logger.info("%s", metrics)


def write_prompts(
    folder: Path, name: str, scenes: Sequence[recolour.Scene], rng: np.random.Generator
) -> list[Prompt]:
    """Writes a prompt file that holds its pictures, one instruction for each scene.

    Args:
      folder: the folder to write to.
      name: of the file.
      scenes: words on their backgrounds.
      rng: draws the shade of each picture and the one that is asked for, which is another.

    Returns:
      The prompts.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    pictures = []
    for scene in scenes:
        old, new = rng.choice(recolour.NAMES, size=2, replace=False).tolist()
        file = io.BytesIO()
        Image.fromarray(scene.picture(recolour.SHADES[old])).save(file, "png", optimize=True)
        pictures.append(file.getvalue())
        picture = {"base64": base64.b64encode(file.getvalue()).decode()}
        colour = [recolour.SHADES[new]] * 3
        prompt = recolour.instruction(new)
        rows.append({"prompt": prompt, "image": picture, "target": scene.word, "colour": colour})
    (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return [
        Prompt(
            text=row["prompt"],
            index=i,
            images=(picture,),
            metadata={"colour": row["colour"]},
        )
        for i, (row, picture) in enumerate(zip(rows, pictures, strict=True))
    ]


def known_vae(pixels: Tensor) -> AutoencoderKLFlux2:
    """Returns the VAE of the bundled SD3 as FLUX.2 has one: normalised by each channel of a patch.

    Args:
      pixels: uint8, [pictures, 3, H, W], which give mean and variance of the channels.
    """
    known = AutoencoderKL.from_pretrained(ROOT / "tiny_glyph_sd3", subfolder="vae").float()
    same = (
        "block_out_channels",
        "down_block_types",
        "up_block_types",
        "layers_per_block",
        "latent_channels",
        "norm_num_groups",
        "mid_block_add_attention",
        "use_quant_conv",
        "use_post_quant_conv",
    )
    vae = AutoencoderKLFlux2(**{name: known.config[name] for name in same})
    vae.load_state_dict(known.state_dict(), strict=False)
    vae.eval().requires_grad_(False)
    patches = Flux2KleinPipeline._patchify_latents(vae.encode(to_float(pixels)).latent_dist.mean)
    vae.bn.running_mean.copy_(patches.mean((0, 2, 3)))
    vae.bn.running_var.copy_(patches.var((0, 2, 3)))
    return vae


def untrained(vae: AutoencoderKLFlux2) -> Flux2KleinPipeline:
    """Returns a stock pipeline around a VAE; its transformer and text encoder are untrained.

    The text encoder stays so: four instructions are told apart by random features as well.
    """
    tokenizer = Qwen2Tokenizer(vocab={"<|endoftext|>": 0}, merges=[]).train_new_from_iterator(
        [*map(recolour.instruction, recolour.NAMES)] * 2 + list(string.printable),
        vocab_size=400,
        new_special_tokens=["<|im_start|>", "<|im_end|>"],
    )
    tokenizer.chat_template = "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}"
    encoder = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=_TEXT_WIDTH,
            intermediate_size=_TEXT_WIDTH,
            num_hidden_layers=27,  # the last of the three layers that the pipeline reads
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            initializer_range=0.2,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    pipe = Flux2KleinPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=vae,
        text_encoder=encoder.eval().requires_grad_(False),
        tokenizer=tokenizer,
        transformer=Flux2Transformer2DModel(
            in_channels=4 * vae.config.latent_channels,
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=_WIDTH // _HEADS,
            num_attention_heads=_HEADS,
            joint_attention_dim=3 * _TEXT_WIDTH,
            timestep_guidance_channels=64,
            axes_dims_rope=(8, 8, 8, 8),
            guidance_embeds=False,
        ),
        is_distilled=True,  # there is no empty instruction to guide on
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def train_flow(pipe: Flux2KleinPipeline, pixels: Tensor) -> float:
    """Trains the transformer by flow matching on pairs of pictures of one scene.

        mean[(v(x, sigma | source, instruction) - (noise - data))^2]
        x = (1 - sigma) data + sigma noise

    Args:
      pipe: the pipeline; its transformer is trained.
      pixels: uint8, [scenes, L, 3, H, W].

    Returns:
      The mean loss of the last 100 steps.
    """
    network = pipe.transformer
    with torch.no_grad():
        coded = [pipe._encode_vae_image(to_float(scene), None) for scene in pixels]
    latents = torch.stack(coded).flatten(3).transpose(2, 3)  # [scenes, L, N, channels]
    embeds, text_ids = pipe.encode_prompt(
        [*map(recolour.instruction, recolour.NAMES)], max_sequence_length=MAX_TEXT_LENGTH
    )
    ids = torch.cat(
        [pipe._prepare_latent_ids(coded[0][:1]), pipe._prepare_image_ids([coded[0][:1]])], dim=1
    )
    optimizer = torch.optim.AdamW(network.parameters(), lr=LR, betas=(0.9, 0.99), fused=True)
    averaged = copy.deepcopy(network).requires_grad_(False)
    num_scenes, _, num_tokens = latents.shape[:3]
    named = torch.tensor([LEVELS.index(shade) for shade in recolour.SHADES.values()])
    losses: list[float] = []
    for step in range(1, STEPS + 1):
        optimizer.param_groups[0]["lr"] = LR * min(1.0, step / 100, 2 * (1 - step / (STEPS + 1)))
        scene = torch.randint(num_scenes, (BATCH,))
        source, asked = torch.randint(len(named), (2, BATCH))
        painted = torch.lerp(named[source].float(), named[asked].float(), torch.rand(BATCH))
        data = latents[scene, painted.round().long()]
        noise = torch.randn_like(data)
        sigma = torch.randn(BATCH).add(0.5).sigmoid()
        noisy = torch.lerp(data, noise, sigma.view(-1, 1, 1))
        velocity = network(
            hidden_states=torch.cat([noisy, latents[scene, named[source]]], dim=1),
            timestep=sigma,
            encoder_hidden_states=embeds[asked],
            txt_ids=text_ids[:1],
            img_ids=ids,
        ).sample[:, :num_tokens]
        loss = (velocity - (noise - data)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            for average, value in zip(averaged.parameters(), network.parameters(), strict=True):
                average.lerp_(value, 1 - min(0.99, step / (step + 10)))
        losses.append(loss.item())
        if step % 50 == 0:
            logger.info("flow step %d: loss %.4f", step, np.mean(losses[-50:]))
    pipe.transformer = averaged
    return round(float(np.mean(losses[-100:])), 4)


def save(pipe: Flux2KleinPipeline, folder: Path) -> None:
    """Writes the checkpoint, with transformer and VAE in fp16; see `build_tiny_glyph_sd3.save`."""
    pipe.save_pretrained(folder)
    for name in ("transformer", "vae"):
        copy.deepcopy(pipe.components[name]).half().save_pretrained(folder / name)


def evaluate_checkpoint(checkpoint: Path, prompts: Sequence[Prompt]) -> dict[str, float]:
    """Measures the reward of the saved files, used as a user uses them.

    Args:
      checkpoint: folder of the saved pipeline.
      prompts: held-out instructions with their pictures.

    Returns:
      The mean reward and the means of its parts, by name.
    """
    pipe = Flux2KleinPipeline.from_pretrained(checkpoint)
    pipe.set_progress_bar_config(disable=True)
    edited = [
        pipe(
            image=Image.fromarray(read_picture(prompt.images[0])),
            prompt=prompt.text,
            num_inference_steps=EVALUATED_STEPS,
            guidance_scale=1.0,
            max_sequence_length=MAX_TEXT_LENGTH,
            generator=torch.Generator().manual_seed(SEED + prompt.index),
            output_type="np",
        ).images[0]
        for prompt in prompts
    ]
    pictures = (np.stack(edited) * 255).round().astype(np.uint8)
    scores = LetterColour()(pictures, prompts)
    means = {"reward": np.mean(scores.values)}
    means |= {name: np.mean(values) for name, values in scores.parts.items()}
    return {name: round(float(mean), 4) for name, mean in means.items()}


def _pictures(scenes: Sequence[recolour.Scene]) -> Tensor:
    """Draws every scene in every shade of `LEVELS`: uint8, [scenes, L, 3, H, W]."""
    drawn = [[scene.picture(shade) for shade in LEVELS] for scene in scenes]
    return torch.from_numpy(np.array(drawn)).permute(0, 1, 4, 2, 3).contiguous()


def main() -> None:
    """Parses the command line and builds the model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT, help="where to write (default: replace the bundled files)"
    )
    logging.basicConfig(level=logging.INFO, format="%(message)s", force=True)
    build(parser.parse_args().out)


if __name__ == "__main__":
    main()
