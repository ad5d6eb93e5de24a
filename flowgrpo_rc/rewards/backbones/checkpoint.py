"""Checkpoints of scoring models: where they may be, on which device they go, how they load."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from flowgrpo_rc import reading
from flowgrpo_rc.plugins import check_choice
from flowgrpo_rc.reading import check_on_hub, load_weights
from flowgrpo_rc.rewards.base import check_range

if TYPE_CHECKING:
    from transformers import AutoModel, PreTrainedModel, PreTrainedTokenizerBase

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
PROCESSOR = ("preprocessor_config.json",)
_OF_LAYER = re.compile(r"\d+\.(weight|bias)")


def checkpoint_source(path: str, *, key: str) -> str:
    """Returns what transformers loads from, the path of a folder or a hub id, or ValueError."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        if key == "path" and not (folder / "config.json").is_file():
            raise ValueError(f"{key}={path!r}: no config.json there, so it is no checkpoint")
        return str(folder)
    if path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise ValueError(f"{key}={path!r}: there is no such folder, and it is no hub id")
    return path


def check_source(source: str, *, key: str = "path", names: Sequence[str] = WEIGHTS) -> None:
    """Raises ValueError if neither the folder nor the Hub has one of the files; fetches nothing."""
    folder = Path(source)
    if not folder.is_dir():
        check_on_hub(source, names, key=key)
    elif names is WEIGHTS and not any(folder.glob("*.safetensors")):
        raise ValueError(f"{key}={source}: no file of weights, *.safetensors, is there")


def converted_folder(path: str, files: Sequence[str], converter: str) -> Path:
    """Returns the folder of `examples/convert_reward.py CONVERTER`; ValueError if files lack."""
    folder = Path(path).expanduser()
    for name in files:
        if not (folder / name).is_file():
            raise ValueError(
                f"path={path!r} has no {name}: make it by examples/convert_reward.py {converter}"
            )
    return folder


@dataclass(kw_only=True, eq=False)
class LoadsModel:
    """Options of a model of transformers, which loads at first use."""

    path: str  # a local folder or a hub id; weights are read from safetensors only
    device: str = "auto"  # or cpu, cuda, cuda:1; auto: the GPU of this process, or the CPU
    dtype: str = "fp32"  # or bf16, fp16
    batch_size: int = 32  # samples in one forward

    def __post_init__(self) -> None:
        try:
            kind = "auto" if self.device == "auto" else torch.device(self.device).type
        except RuntimeError as error:
            raise ValueError(f"device={self.device!r}: give auto, cpu, cuda or cuda:1") from error
        if kind == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"device={self.device!r}: torch finds no CUDA device; give cpu")
        check_choice("dtype", self.dtype, DTYPES)
        check_range(1, batch_size=self.batch_size)

    def load(
        self, cls: type[PreTrainedModel | AutoModel], path: str, **options: Any
    ) -> PreTrainedModel:
        """Loads a model for inference, with options of `reading.load_weights`."""
        options |= {"dtype": DTYPES[self.dtype], "trust_remote_code": False}
        model = load_weights(cls, path, f"path={path!r}", **options)
        return model.to(_device(self.device)).requires_grad_(False).eval()


def _device(device: str) -> torch.device:
    """Returns the torch device. `auto` is the GPU of this process, or the CPU if there is none."""
    if device != "auto":
        return torch.device(device)
    if not torch.cuda.is_available():
        return torch.device("cpu")
    # The current device belongs to a thread, and rewards run in threads of their own.
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    return torch.device("cuda", rank % torch.cuda.device_count())


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a scoring model, by the rules of `reading.load_tokenizer`."""
    from transformers import AutoTokenizer

    where = f"path={str(path)!r}"
    return reading.load_tokenizer(AutoTokenizer, str(path), where, trust_remote_code=False)


def linear_layers(state: Mapping[str, Tensor]) -> list[nn.Linear]:
    """Builds linear layers in a row from `N.weight` and `N.bias`; ValueError for anything else."""
    known = all(_OF_LAYER.fullmatch(name) for name in state)
    numbers = sorted({int(name.split(".")[0]) for name in state}) if known else []
    weights = [state[f"{number}.weight"].float() for number in numbers]
    fits = all(weight.ndim == 2 for weight in weights) and all(
        before.shape[0] == after.shape[1] for before, after in pairwise(weights)
    )
    fits &= all(t.is_floating_point() and bool(t.isfinite().all()) for t in state.values())
    fits &= len(state) in (len(weights), 2 * len(weights))  # a bias for all or none
    if not weights or not fits:
        shapes = {name: list(tensor.shape) for name, tensor in state.items()}
        raise ValueError(f"the head must be finite linear layers in a row; it has {shapes}")
    layers = []
    for number, weight in zip(numbers, weights, strict=True):
        bias = state.get(f"{number}.bias")
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
        layer.load_state_dict({"weight": weight} | ({} if bias is None else {"bias": bias}))
        layers.append(layer.requires_grad_(False))
    return layers
