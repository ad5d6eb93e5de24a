"""Builds the bundled checkpoint `tiny_glyph_sd3` and its prompt lists from nothing but a seed.

    PYTHONPATH=examples python -m bundled_models.build_tiny_glyph_sd3 [--out DIR]

writes DIR/tiny_glyph_sd3 (diffusers layout, with build.log and build_metrics.json) and DIR/prompts.
Without --out they replace the bundled ones. Takes about half an hour on two CPU cores.

Legend: N pictures, C channels, H and W height and width in pixels.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL, StableDiffusion3Pipeline

from bundled_models import glyphs
from bundled_models.evaluate import NUM_INFERENCE_STEPS, Readability, generate, readability
from bundled_models.train_flow import FlowConfig, train_flow
from bundled_models.train_vae import VaeConfig, encode, train_vae
from flowgrpo_rc.assets import ROOT

SEED = 0
NUM_THREADS = 2
NUM_TRAIN_WORDS = 8192
NUM_VAL_WORDS = 512
# Evaluated during training, to end it. Like the validation words they are never trained on.
NUM_MONITOR_WORDS = 256

logger = logging.getLogger(__name__)


def build(out: Path, *, snapshots: Path | None = None) -> None:
    """Runs the whole build: prompt lists, VAE, transformer, saving, evaluation of the saved files.

    Args:
      out: the folder to write to.
      snapshots: a folder that gets a checkpoint at every evaluation; None for none.
    """
    checkpoint = out / "tiny_glyph_sd3"
    checkpoint.mkdir(parents=True, exist_ok=True)
    _log_to(checkpoint / "build.log")
    torch.set_num_threads(NUM_THREADS)
    start = time.perf_counter()
    train_words, val_words, monitor_words = split_words()
    write_prompts(out / "prompts", train_words, val_words)
    held_out = {*val_words, *monitor_words}

    vae = train_vae(VaeConfig(), exclude=held_out, seed=SEED)
    reconstruction = _reconstruction(vae, monitor_words)
    logger.info("vae: OCR reward of held-out reconstructions %.3f", reconstruction.reward)
    vae_seconds = time.perf_counter() - start

    def evaluate(pipe: StableDiffusion3Pipeline, step: int) -> Readability:
        if snapshots is not None:
            save(pipe, snapshots / f"step_{step}")
        return readability(generate(pipe, monitor_words, seed=SEED), monitor_words)

    result = train_flow(FlowConfig(), vae, exclude=held_out, seed=SEED, evaluate=evaluate)
    save(result.pipe, checkpoint)
    train_seconds = time.perf_counter() - start

    metrics = {
        "seed": SEED,
        "vae": asdict(VaeConfig())
        | {"reconstruction": asdict(reconstruction), "seconds": round(vae_seconds)},
        "flow": asdict(FlowConfig())
        | {
            "num_steps": result.num_steps,
            "loss": result.loss,
            "seconds": round(train_seconds - vae_seconds),
        },
        "val": evaluate_checkpoint(checkpoint, val_words),
        "num_parameters": _num_parameters(result.pipe),
        "num_threads": NUM_THREADS,
        "versions": {
            name: version(name) for name in ("torch", "diffusers", "transformers", "pillow")
        },
    }
    (checkpoint / "build_metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    logger.info("done in %.0f s", time.perf_counter() - start)


def split_words() -> tuple[list[str], list[str], list[str]]:
    """Draws the words.

    Returns:
      Three lists: for training prompts, for validation, and for the evaluations that decide when
      pre-training ends. No word is in two of them.
    """
    rng = np.random.default_rng(SEED)
    words = glyphs.distinct_words(NUM_TRAIN_WORDS + NUM_VAL_WORDS + NUM_MONITOR_WORDS, rng)
    train_end = NUM_TRAIN_WORDS
    val_end = train_end + NUM_VAL_WORDS
    return words[:train_end], words[train_end:val_end], words[val_end:]


def write_prompts(folder: Path, train_words: Sequence[str], val_words: Sequence[str]) -> None:
    """Writes `glyph_train.txt` and `glyph_val.txt`, one quoted word a line.

    Args:
      folder: the folder to write to.
      train_words: words of the first file.
      val_words: words of the second file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, words in (("glyph_train.txt", train_words), ("glyph_val.txt", val_words)):
        (folder / name).write_text("".join(f"{glyphs.prompt(word)}\n" for word in words))


def save(pipe: StableDiffusion3Pipeline, folder: Path) -> None:
    """Writes the checkpoint, with transformer and VAE in fp16.

    The text encoders stay in fp32, at 0.9 MB. transformers loads them in the precision of the file,
    while diffusers loads the other models in fp32, so fp16 files would give a pipeline that mixes
    both.

    Args:
      pipe: the pipeline in fp32.
      folder: the folder to write to.
    """
    pipe.save_pretrained(folder)
    for name in ("transformer", "vae"):
        copy.deepcopy(pipe.components[name]).half().save_pretrained(folder / name)


def evaluate_checkpoint(checkpoint: Path, words: Sequence[str]) -> dict[str, object]:
    """Measures the OCR reward of the saved files, loaded as a user loads them.

    Args:
      checkpoint: folder of the saved pipeline.
      words: words that the model was not trained on.

    Returns:
      Scores by name, without guidance and with guidance 3.
    """
    pipe = StableDiffusion3Pipeline.from_pretrained(checkpoint)
    pipe.set_progress_bar_config(disable=True)
    metrics: dict[str, object] = {
        "num_words": len(words),
        "num_inference_steps": NUM_INFERENCE_STEPS,
    }
    for guidance_scale in (1.0, 3.0):
        images = generate(pipe, words, seed=SEED, guidance_scale=guidance_scale)
        score = readability(images, words)
        metrics[f"guidance_{guidance_scale:g}"] = asdict(score)
        logger.info(
            "val, guidance %g: reward %.3f, exact %.3f", guidance_scale, score.reward, score.exact
        )
    return metrics


def _reconstruction(vae: AutoencoderKL, words: Sequence[str]) -> Readability:
    """How well OCR reads pictures that went through the VAE."""
    pixels_NHWC = torch.from_numpy(glyphs.render_all(words, np.random.default_rng(SEED)))
    pixels_NCHW = pixels_NHWC.permute(0, 3, 1, 2)
    with torch.no_grad():
        decoded = vae.decode(encode(vae, pixels_NCHW)).sample
    images = ((decoded.clamp(-1, 1) + 1) * 127.5).round().byte().permute(0, 2, 3, 1)
    return readability(images.numpy(), words)


def _num_parameters(pipe: StableDiffusion3Pipeline) -> dict[str, int]:
    models = {
        name: part for name, part in pipe.components.items() if isinstance(part, torch.nn.Module)
    }
    return {name: sum(p.numel() for p in model.parameters()) for name, model in models.items()}


def _log_to(file: Path) -> None:
    logging.basicConfig(
        level=logging.INFO,
        format="%(message)s",
        handlers=[logging.FileHandler(file, mode="w"), logging.StreamHandler()],
    )


def main() -> None:
    """Parses the command line and builds the model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT, help="where to write (default: replace the bundled files)"
    )
    parser.add_argument(
        "--snapshots", type=Path, help="also keep a checkpoint at every evaluation, in this folder"
    )
    arguments = parser.parse_args()
    build(arguments.out, snapshots=arguments.snapshots)


if __name__ == "__main__":
    main()
