"""Small runs: their settings, how a test reads what they left, and runs that go on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from flowgrpo_rc.records.checkpoint import list_checkpoints, load_checkpoint

# Where runs train: `FLOWGRPO_TEST_DEVICE=cuda make test` takes a card.
DEVICE = os.environ.get("FLOWGRPO_TEST_DEVICE", "cpu")
WORDS = ("AB7X", "HELP", "K9Q", "MNPR", "TUV2", "WXY", "C3D4", "EFGH")
Train = Callable[..., int]
Trained = Callable[..., Path]
# Digests of the newest tensors, the state beside them, and the metrics without timings.
State = tuple[dict[str, str], dict[str, object], list[dict[str, Any]]]
STOP = "trainer.max_time=0.001"  # ends a run after its first step, with exit code 75
# What a run leaves in its folder.
LEFT = {"config.yaml", "environment.json", "metrics.jsonl", "report.html"}
LEFT |= {"samples", "checkpoints", "lora"}
SMALL_TEXT = (
    "--config-name=token_grpo",
    "data.train_batch_size=4",
    "rollout.n=4",
    "rollout.micro_batch_size_per_gpu=null",
    "rollout.val_kwargs.n=8",
    "actor.ppo_mini_batch_size=2",
    "actor.ppo_micro_batch_size_per_gpu=4",
    "trainer.total_training_steps=2",
    f"trainer.device={DEVICE}",
)
# Of pipelines, by a short name.
NAMES = {
    "flux": "FluxPipeline",
    "qwen": "QwenImagePipeline",
    "sana": "SanaPipeline",
    "schnell": "flux_schnell",
    "wan": "WanPipeline",
    "z_image": "ZImagePipeline",
}
VIDEO = (
    "reward.terms.jpeg=null",
    "+reward.terms.light={_target_: function, path: 'support.prompts:brightness'}",
)
# A run of finished samples, which have no window.
NFT = (
    "rollout.algo.sde_window_size=0",
    "rollout.algo.sde_window_range=null",
    "rollout.algo.noise_level=0.7",
    "rollout.algo.shared_prefix=false",
    "rollout.algo.tail_steps=null",
    "actor.diffusion_loss.loss_mode=diffusion_nft",
    "actor.diffusion_loss.clip_ratio=1e-4",
    "actor.diffusion_loss.times=2",
    "actor.diffusion_loss.old_decay_rate=0.1",
    "algorithm.rollout_correction=disabled",
)


def small_run(checkpoint: Path, prompt_file: Path, folder: Path) -> list[str]:
    """Returns the overrides of a run of two small steps in a folder."""
    return [
        f"model.path={checkpoint}",
        "model.lora_rank=4",
        "model.lora_alpha=8",
        f"data.train_files={prompt_file}",
        f"data.val_files={prompt_file}",
        "data.allow_overlap=true",
        "data.train_batch_size=4",
        "rollout.n=2",
        "rollout.dtype=fp32",
        "rollout.algo.shared_prefix=false",
        "actor.steps_per_forward=1",
        "rollout.micro_batch_size_per_gpu=null",
        "rollout.pipeline.num_inference_steps=4",
        "rollout.algo.sde_window_size=2",
        "rollout.algo.sde_window_range=[0,3]",
        "rollout.val_kwargs.num_inference_steps=2",
        "rollout.val_kwargs.n=8",
        "actor.ppo_mini_batch_size=2",
        "actor.ppo_micro_batch_size_per_gpu=2",
        "actor.optim.lr=1e-3",
        "actor.diffusion_loss.clip_ratio=1e-4",
        "actor.ema.update_interval=2",
        "algorithm.rollout_correction.bypass_mode=false",
        "reward.terms.ocr=null",
        "reward.terms.jpeg.weight=1.0",
        "trainer.total_training_steps=2",
        f"trainer.device={DEVICE}",
        f"trainer.output_dir={folder}",
    ]


def fingerprint(state: Mapping[str, torch.Tensor]) -> str:
    """Returns the SHA-256 over names and bytes of tensors."""
    digest = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        digest.update(name.encode())
        digest.update(
            tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        )
    return digest.hexdigest()


def read_rows(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def num_rows(run: Path) -> int:
    """Returns how many rows metrics.jsonl has."""
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def without_timings(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns rows without seconds, speed, memory and what workers were busy with."""
    return [
        {k: v for k, v in row.items() if not k.startswith(("timing_s/", "perf/", "workers/"))}
        for row in rows
    ]


def training_rows(run: Path) -> list[dict[str, Any]]:
    """Returns the metrics of training alone, without timings."""
    rows = without_timings(read_rows(run))
    return [{name: row[name] for name in row if not name.startswith("val/")} for row in rows]


def final_state(run: Path) -> State:
    """Returns what a run has come to."""
    newest = load_checkpoint(list_checkpoints(run / "checkpoints")[-1])
    prints = {stem: fingerprint(tensors) for stem, tensors in newest.tensors.items()}
    return prints, dict(newest.state), without_timings(read_rows(run))


def stopped_and_whole(train: Train, folder: Path, *settings: str, stops: int = 1) -> Path:
    """Trains once at a stretch, and once with stops after the first steps; both end the same.

    Returns the folder of the run that was stopped.
    """
    whole, stopped = folder / "whole", folder / "stopped"
    assert train(*settings, f"trainer.output_dir={whole}") == 0
    for _ in range(stops):
        assert train(*settings, STOP, f"trainer.output_dir={stopped}") == 75
    assert train(*settings, f"trainer.output_dir={stopped}") == 0
    assert final_state(stopped) == final_state(whole)
    return stopped
