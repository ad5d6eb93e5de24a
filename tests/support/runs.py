"""Small runs: the type of the `train` fixture, and how a test reads what a run left."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

WORDS = ("AB7X", "HELP", "K9Q", "MNPR", "TUV2", "WXY", "C3D4", "EFGH")
Train = Callable[..., int]
Trained = Callable[..., Path]


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


def without_timings(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns rows without seconds, speed, memory and what workers were busy with."""
    return [
        {k: v for k, v in row.items() if not k.startswith(("timing_s/", "perf/", "workers/"))}
        for row in rows
    ]
