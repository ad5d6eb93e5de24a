"""Measures how much the pictures of a held-out word differ, which training may take away.

`ladder.py --further` leaves a line in results/diversity.jsonl for each of its runs, and one for the
base model. `WORDS` words with `NOISES` noises each are drawn by the ODE in fp32:

    pixels    root mean square difference of two pictures of a word, of 1 at most, averaged over all
              pairs and words
    texts     edit distance of what is read in them, over the length of the longer text, likewise
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
import torch
from cells import load, save
from diffusers import StableDiffusion3Pipeline
from rapidfuzz.distance import Levenshtein

from flowgrpo_rc import assets
from flowgrpo_rc.rewards.ocr import OCR

STUDY = "diversity"
BASE = "base"
WORDS, NOISES = 64, 8
SIZE = {"height": 32, "width": 64, "guidance_scale": 1.0, "num_inference_steps": 10}


def keep(name: str, run: Path, results: Path) -> None:
    """Saves the diversity of a run's LoRA, and that of the base model if it is not there yet."""
    if BASE not in load(STUDY, results):
        save(STUDY, BASE, diversity(None), results)
    save(STUDY, name, diversity(run / "lora"), results)


def diversity(lora: Path | None, words: int = WORDS, noises: int = NOISES) -> dict[str, float]:
    """Draws pictures with a LoRA, or with the base model, and returns their mean distances."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    pipe = StableDiffusion3Pipeline.from_pretrained(assets.path("tiny_glyph_sd3"))
    pipe.set_progress_bar_config(disable=True)
    if lora is not None:
        pipe.load_lora_weights(lora)
    reader = OCR()
    prompts = Path(assets.path("prompts/glyph_val.txt")).read_text().splitlines()[:words]
    found: list[tuple[float, float]] = []
    for prompt in prompts:
        generators = [torch.Generator().manual_seed(seed) for seed in range(noises)]
        options = {**SIZE, "max_sequence_length": 16, "generator": generators}
        drawn = pipe(prompt, num_images_per_prompt=noises, output_type="np", **options).images
        pictures = np.asarray(drawn, dtype=np.float64)
        found.append(distances(pictures, reader.read((pictures * 255).round().astype(np.uint8))))
    torch.set_num_threads(threads)
    pixels, texts = np.mean(found, axis=0)
    return {"pixels": float(pixels), "texts": float(texts)}


def distances(pictures: np.ndarray, texts: Sequence[str]) -> tuple[float, float]:
    """Returns the mean distances of pictures [N, H, W, 3] from 0 to 1, and of N texts, by pairs."""
    pairs = [*combinations(range(len(texts)), 2)]
    pixels = [float(np.sqrt(((pictures[a] - pictures[b]) ** 2).mean())) for a, b in pairs]
    edits = [Levenshtein.normalized_distance(texts[a], texts[b]) for a, b in pairs]
    return float(np.mean(pixels)), float(np.mean(edits))
