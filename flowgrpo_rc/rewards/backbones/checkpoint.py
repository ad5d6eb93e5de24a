"""Checkpoints of scoring models: where they may be, on which device they go, how they load."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from flowgrpo_rc.libraries import loading

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def checkpoint_source(path: str, *, key: str) -> str:
    """Returns what transformers loads from: the path of a folder, or a hub id, `owner/name`.

    Raises:
      ValueError: `path` is neither; `key` is the option that holds it.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        return str(folder)
    if path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise ValueError(
            f"{key}={path!r}: there is no such folder, and it has not the form of a hub id"
        )
    return path


def converted_folder(path: str, files: Sequence[str], converter: str) -> Path:
    """Returns the folder that `examples/convert_reward.py` has made. ValueError if it has not.

    Args:
      path: the folder.
      files: what it must hold.
      converter: the first argument of the script.
    """
    folder = Path(path).expanduser()
    missing = [name for name in files if not (folder / name).is_file()]
    if missing:
        raise ValueError(
            f"path={path!r} has no {missing[0]}: make it by examples/convert_reward.py {converter}"
        )
    return folder


def check_loading(*, device: str, dtype: str, batch_size: int) -> None:
    """Raises ValueError for a device that is not here, an unknown dtype or no batch."""
    try:
        kind = "auto" if device == "auto" else torch.device(device).type
    except RuntimeError as error:
        raise ValueError(f"device={device!r}: give auto, cpu, cuda or cuda:1") from error
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={device!r}: torch finds no CUDA device; give cpu")
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}: allowed are {', '.join(DTYPES)}")
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size!r} must be at least 1")


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
    """Loads the tokenizer of a scoring model. ValueError if code of the model would have to run."""
    from transformers import AutoTokenizer

    with loading(f"path={str(path)!r}"):
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)


def load_pretrained(cls: Any, path: str, *, device: str, dtype: str) -> Any:
    """Loads a model of a transformers class from safetensors, for inference.

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
