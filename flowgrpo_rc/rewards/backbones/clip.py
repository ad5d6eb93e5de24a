"""CLIP: features of images and texts as vectors of length 1.

Shapes: N images or texts, H x W pixels, D features.

Reference: "Learning Transferable Visual Models From Natural Language Supervision",
https://arxiv.org/abs/2103.00020.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.plugins import build
from flowgrpo_rc.rewards.backbones.checkpoint import (
    check_loading,
    checkpoint_source,
    load_pretrained,
    load_tokenizer,
)
from flowgrpo_rc.rewards.base import Reward, Scores


class _LoadedClip(NamedTuple):
    model: Any
    images: Any
    tokenizer: Any


class Clip:
    """A `CLIPModel` of transformers with its image processor and tokenizer; loads at its first use.

    Args:
      path: a local folder or a hub id; weights are read from safetensors only.
      processor: where the image processor and the tokenizer are, if not at `path`.
      device: auto (the GPU of this process, or the CPU), cpu, cuda, cuda:1.
      dtype: fp32, bf16 or fp16.
      batch_size: images or texts in one forward.
    """

    def __init__(
        self,
        *,
        path: str,
        processor: str | None = None,
        device: str = "auto",
        dtype: str = "fp32",
        batch_size: int = 32,
    ) -> None:
        self.path = checkpoint_source(path, key="path")
        if Path(self.path).is_dir() and not (Path(self.path) / "config.json").is_file():
            raise ValueError(
                f"path={path!r}: no config.json there, so it is no CLIP checkpoint of transformers"
            )
        self.processor = (
            self.path if processor is None else checkpoint_source(processor, key="processor")
        )
        check_loading(device=device, dtype=dtype, batch_size=batch_size)
        self.device = device
        self.dtype = dtype
        self.batch_size = batch_size

    def cosines(self, images: np.ndarray, texts: Sequence[str]) -> Tensor:
        """Computes the cosine of each image [N, H, W, 3] uint8 and its text, fp32 [N]."""
        return (self.image_features(images) * self.text_features(texts)).sum(1)

    def logit_scale(self) -> float:
        """Returns the factor by which the model multiplies a cosine."""
        return float(self._loaded.model.logit_scale.float().exp())

    def image_features(self, images: np.ndarray) -> Tensor:
        """Computes unit vectors [N, D], fp32 on the CPU, of images [N, H, W, 3] uint8."""

        def forward(batch: Sequence[np.ndarray]) -> Any:
            pixels = self._loaded.images(
                list(batch), return_tensors="pt", input_data_format="channels_last"
            )
            model = self._loaded.model
            return model.get_image_features(pixels.pixel_values.to(model.device, model.dtype))

        return self._in_batches(forward, images)

    def text_features(self, texts: Sequence[str]) -> Tensor:
        """Computes unit vectors [N, D], fp32 on the CPU, of texts; cuts a text that is too long."""
        model = self._loaded.model
        tokenizer = self._loaded.tokenizer
        longest = model.config.text_config.max_position_embeddings

        def forward(batch: Sequence[str]) -> Any:
            tokens = tokenizer(
                list(batch), padding=True, truncation=True, max_length=longest, return_tensors="pt"
            )
            return model.get_text_features(**tokens.to(model.device))

        # The samples of a group share their prompt, so each text is encoded once.
        distinct = list(dict.fromkeys(texts))
        features = self._in_batches(forward, distinct)
        return features[[distinct.index(text) for text in texts]]

    @torch.inference_mode()
    def _in_batches(self, forward: Callable[[Any], Any], inputs: Any) -> Tensor:
        features = [
            forward(inputs[start : start + self.batch_size]).pooler_output.float()
            for start in range(0, len(inputs), self.batch_size)
        ]
        return torch.nn.functional.normalize(torch.cat(features), dim=1).cpu()

    @cached_property
    def _loaded(self) -> _LoadedClip:
        from transformers import CLIPImageProcessorPil, CLIPModel

        return _LoadedClip(
            load_pretrained(CLIPModel, self.path, device=self.device, dtype=self.dtype),
            CLIPImageProcessorPil.from_pretrained(self.processor),
            load_tokenizer(self.processor),
        )


class ClipReward(Reward):
    """Scores by the cosine of image and prompt in a CLIP.

    Args:
      path: the CLIP checkpoint, a local folder or a hub id.
      options: `processor`, `device`, `dtype` and `batch_size` of `Clip`.
    """

    def __init__(self, *, path: str, **options: Any) -> None:
        self._clip = build(Clip, {"path": path, **options}, "Clip")

    def __call__(self, samples: np.ndarray, prompts: Sequence[Prompt]) -> Scores:
        cosines = self._clip.cosines(samples, [prompt.text for prompt in prompts])
        return Scores(values=(cosines * self._scale()).tolist())

    def _scale(self) -> float:
        """Returns the factor of the cosine."""
        return 1.0
