"""Checkpoints of scoring models: where they may be, on which device they go, how they load."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from flowgrpo_rc.libraries import loading

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def checkpoint_source(path: str, *, key: str) -> str:
    """Returns what transformers loads from: the path of a folder, or a hub id.

    Args:
      path: a local folder, or text in the form of a hub id, `owner/name`.
      key: name of the option that holds the path, for the error message.

    Raises:
      ValueError: `path` is neither.
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
    """Raises ValueError for a device that torch does not know or this machine does not have."""
    if device == "auto":
        return
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise ValueError(f"device={device!r}: give auto, cpu, cuda or cuda:1") from error
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={device!r}: torch finds no CUDA device; give cpu")


def resolve_device(device: str) -> torch.device:
    """Returns the torch device. `auto` is the GPU of this process, or the CPU if there is none."""
    if device != "auto":
        return torch.device(device)
    # The current device belongs to a thread, and rewards run in threads of their own.
    return (
        torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )


def load_tokenizer(path: str | Path) -> Any:
    """Loads the tokenizer of a scoring model.

    Args:
      path: a local folder or a hub id.

    Raises:
      ValueError: it needs code that comes with the model.
    """
    from transformers import AutoTokenizer

    with loading(f"path={str(path)!r}"):
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)


def load_pretrained(cls: Any, path: str, *, device: str, dtype: str) -> Any:
    """Loads a model from safetensors for inference.

    Args:
      cls: the model class of transformers.
      path: a local folder or a hub id.
      device: as in `resolve_device`.
      dtype: a key of `DTYPES`.

    Raises:
      ValueError: the checkpoint lacks weights of the class.
    """
    model, report = cls.from_pretrained(
        path,
        dtype=DTYPES[dtype],
        use_safetensors=True,
        output_loading_info=True,
        trust_remote_code=False,
    )
    lacking = sorted(
        {*report["missing_keys"], *(str(key) for key, *_ in report["mismatched_keys"])}
    )
    if lacking:
        raise ValueError(
            f"path={path!r} is no {cls.__name__}: it lacks {lacking[0]} and {len(lacking) - 1} more"
        )
    return model.to(resolve_device(device)).requires_grad_(False).eval()
