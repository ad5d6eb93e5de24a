"""Builds the bundled CLIP `tiny_clip`, which knows pictures of short words, from only a seed.

    PYTHONPATH=examples python -m bundled_models.build_tiny_clip [--out DIR]

writes DIR/tiny_clip (transformers layout, with build_metrics.json). Without --out it replaces the
bundled one. Takes about seven minutes of one CPU thread.

The model is a stock `CLIPModel`: a ViT on the picture resized to 48 x 48, and a text encoder with
one token per character. It is trained with CLIP's contrastive loss on rendered words, blurred and
noisy in part, against the words. Every second word of a batch is the one before it with one
character changed, so that single characters count. The words of the validation list are never
trained on.

The build measures, on the 512 validation words, how often the right word is found among all of
them, and how often a picture is nearer to its word than to the same word with one character
changed.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Collection, Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageFilter
from torch import Tensor
from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel, CLIPTokenizer

from bundled_models.glyphs import ALPHABET, prompt, random_word, render, render_all
from bundled_models.tiny_sd3 import MAX_TEXT_LENGTH, clip_tokenizer
from flowgrpo_rc.assets import ROOT, path

SEED = 0
NUM_THREADS = 1
NUM_STEPS = 900
NUM_WARMUP_STEPS = 50
BATCH_SIZE = 96
LEARNING_RATE = 2e-3
IMAGE_SIZE = 48

logger = logging.getLogger(__name__)


def build(out: Path) -> None:
    """Runs the whole build: training, saving, evaluation of the saved files.

    Args:
      out: the folder to write to.
    """
    torch.set_num_threads(NUM_THREADS)
    start = time.perf_counter()
    held_out = [line.strip('"') for line in path("prompts/glyph_val.txt").read_text().split()]
    tokenizer = clip_tokenizer()
    processor = image_processor()
    model = build_model(clip_tokenizer())
    loss = train(model, tokenizer, processor, exclude=held_out)
    checkpoint = out / "tiny_clip"
    for part in (model, tokenizer, processor):
        part.save_pretrained(checkpoint)
    metrics = {
        "seed": SEED,
        "steps": NUM_STEPS,
        "loss": round(loss, 4),
        "val": evaluate_checkpoint(checkpoint, held_out),
        "num_parameters": model.num_parameters(),
        "num_threads": NUM_THREADS,
        "seconds": round(time.perf_counter() - start),
        "versions": {
            name: version(name) for name in ("torch", "transformers", "tokenizers", "pillow")
        },
    }
    (checkpoint / "build_metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    logger.info("%s", json.dumps(metrics["val"], indent=2))


def image_processor() -> CLIPImageProcessorPil:
    """Returns a processor that resizes the whole picture, of any shape, to 48 x 48."""
    size = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    return CLIPImageProcessorPil(size=size, do_center_crop=False)


def build_model(tokenizer: CLIPTokenizer) -> CLIPModel:
    """Builds a CLIP of 0.33 million parameters with random weights."""
    torch.manual_seed(SEED)
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": MAX_TEXT_LENGTH,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = {
        "hidden_size": 96,
        "intermediate_size": 192,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "image_size": IMAGE_SIZE,
        "patch_size": 8,
    }
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=64))


def train(
    model: CLIPModel,
    tokenizer: CLIPTokenizer,
    processor: CLIPImageProcessorPil,
    *,
    exclude: Sequence[str],
) -> float:
    """Trains with CLIP's contrastive loss, https://arxiv.org/abs/2103.00020.

    Args:
      model: the model; it is changed.
      tokenizer: turns words into tokens.
      processor: turns pictures into the model's input.
      exclude: words that are never trained on.

    Returns:
      The mean loss of the last 100 steps.
    """
    rng = np.random.default_rng(SEED + 1)
    excluded = frozenset(exclude)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.05
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _learning_rate_factor)
    losses: list[float] = []
    while len(losses) < NUM_STEPS:
        words = _words_in_pairs(rng, excluded)
        pictures = processor(
            [_degraded(render(word, rng), rng) for word in words], return_tensors="pt"
        )
        texts = tokenizer([prompt(word) for word in words], padding=True, return_tensors="pt")
        loss = model(**texts, **pictures, return_loss=True).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
        if len(losses) % 100 == 0:
            logger.info("step %d: loss %.4f", len(losses), np.mean(losses[-100:]))
    return float(np.mean(losses[-100:]))


@torch.no_grad()
def evaluate_checkpoint(checkpoint: Path, words: Sequence[str]) -> dict[str, float]:
    """Measures the accuracy of the saved files on clean pictures, loaded as a user loads them.

    Args:
      checkpoint: folder of the saved model.
      words: words that the model was not trained on.

    Returns:
      Accuracies by name.
    """
    model = CLIPModel.from_pretrained(checkpoint).eval()
    tokenizer = CLIPTokenizer.from_pretrained(checkpoint)
    processor = CLIPImageProcessorPil.from_pretrained(checkpoint)
    rng = np.random.default_rng(SEED + 2)
    pictures = processor(list(render_all(words, rng)), return_tensors="pt")

    def scores(candidates: Sequence[str]) -> Tensor:
        texts = tokenizer([prompt(word) for word in candidates], padding=True, return_tensors="pt")
        return model(**texts, **pictures).logits_per_image

    own = scores(words)
    changed = scores([one_character_changed(word, rng) for word in words])
    found = own.argmax(1) == torch.arange(len(words))
    return {
        "found_among_all": found.double().mean().item(),
        "nearer_than_one_changed": (own.diag() > changed.diag()).double().mean().item(),
    }


def one_character_changed(word: str, rng: np.random.Generator) -> str:
    """Returns the word with another character of the alphabet in one place."""
    place = rng.integers(len(word))
    others = ALPHABET.replace(word[place], "")
    return word[:place] + others[rng.integers(len(others))] + word[place + 1 :]


def _words_in_pairs(rng: np.random.Generator, excluded: Collection[str]) -> list[str]:
    """Distinct words; each second one differs from the one before it in one character."""
    words: list[str] = []
    while len(words) < BATCH_SIZE:
        word = random_word(rng)
        other = one_character_changed(word, rng)
        if not {word, other} & {*words, *excluded}:
            words += [word, other]
    return words


def _degraded(picture: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A picture that is blurred and noisy to a random degree, in half of the cases."""
    if rng.random() < 0.5:
        return picture
    blurred = Image.fromarray(picture).filter(ImageFilter.GaussianBlur(float(rng.uniform(0, 1.2))))
    noisy = np.asarray(blurred) + rng.normal(0, rng.uniform(0, 30), picture.shape)
    return noisy.clip(0, 255).astype(np.uint8)


def _learning_rate_factor(step: int) -> float:
    """Linear warm-up, then linear decay to zero over the whole run."""
    return min(1.0, (step + 1) / NUM_WARMUP_STEPS) * (1 - step / NUM_STEPS)


def main() -> None:
    """Parses the command line and builds the model."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT, help="where to write (default: replace the bundled files)"
    )
    build(parser.parse_args().out)


if __name__ == "__main__":
    main()
