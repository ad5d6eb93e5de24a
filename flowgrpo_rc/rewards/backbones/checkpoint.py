"""What rewards with weights of their own share: where a checkpoint may be, on which device it goes,
how it loads.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def checkpoint_source(path: str, *, key: str) -> str:
    """What transformers loads from: a folder, or what has the form of a hub id. ValueError, with
    `key`, for neither.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        return str(folder)
    if path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise ValueError(
            f"{key}={path!r}: there is no such folder, and it has not the form of a hub id"
        )
    return path


def check_device(device: str) -> None:
    """ValueError for a device that torch does not know or that is not there."""
    if device == "auto":
        return
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise ValueError(f"device={device!r}: give auto, cpu, cuda or cuda:1") from error
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={device!r}: torch finds no CUDA device; give cpu")


def resolve_device(device: str) -> torch.device:
    """`auto` is the card of this process, or the CPU where there is none."""
    if device != "auto":
        return torch.device(device)
    # The current device belongs to a thread, and rewards run in threads of their own.
    return (
        torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        if torch.cuda.is_available()
        else torch.device("cpu")
    )


def load_pretrained(cls: Any, path: str, *, device: str, dtype: str) -> Any:
    """A model of class `cls` from safetensors, for inference. ValueError where the checkpoint lacks
    weights of it.
    """
    model, report = cls.from_pretrained(
        path, dtype=DTYPES[dtype], use_safetensors=True, output_loading_info=True
    )
    lacking = sorted(
        {*report["missing_keys"], *(str(key) for key, *_ in report["mismatched_keys"])}
    )
    if lacking:
        raise ValueError(
            f"path={path!r} is no {cls.__name__}: it lacks {lacking[0]} and {len(lacking) - 1} more"
        )
    return model.to(resolve_device(device)).requires_grad_(False).eval()
