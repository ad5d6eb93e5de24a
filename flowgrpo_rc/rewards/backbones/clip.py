"""CLIP: features of images and texts as vectors of length 1.

Shapes: N images or texts, H x W pixels, D features.

Reference: "Learning Transferable Visual Models From Natural Language Supervision",
https://arxiv.org/abs/2103.00020.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.rewards.backbones.checkpoint import (
    PROCESSOR,
    LoadsModel,
    check_source,
    checkpoint_source,
    load_tokenizer,
)
from flowgrpo_rc.rewards.base import Reward, Scores, batches

if TYPE_CHECKING:
    from transformers import CLIPImageProcessorPil, CLIPModel, PreTrainedTokenizerBase
    from transformers.modeling_outputs import BaseModelOutputWithPooling

Inputs = TypeVar("Inputs", np.ndarray, list[str])


@dataclass(kw_only=True, eq=False)
class ClipReward(LoadsModel, Reward):
    """Scores by the cosine of image and prompt in a `CLIPModel`, which loads at first use."""

    is_scaled: ClassVar[bool] = False  # by the factor of the model

    processor: str | None = None  # the place of image processor and tokenizer, if not `path`

    def __post_init__(self) -> None:
        super().__post_init__()
        self._path = checkpoint_source(self.path, key="path")
        self._processor = self._path
        if self.processor is not None:
            self._processor = checkpoint_source(self.processor, key="processor")

    def check(self) -> None:
        """Raises ValueError if weights or image processor cannot be had; fetches nothing."""
        check_source(self._path)
        key = "path" if self.processor is None else "processor"
        check_source(self._processor, key=key, names=PROCESSOR)

    def __call__(self, samples: np.ndarray, prompts: Sequence[Prompt]) -> Scores:
        texts = [prompt.text for prompt in prompts]
        cosines = (self.image_features(samples) * self.text_features(texts)).sum(1)
        if self.is_scaled:
            cosines = cosines * float(self._loaded[0].logit_scale.float().exp())
        return Scores(values=cosines.tolist())

    def image_features(self, images: np.ndarray) -> Tensor:
        """Computes unit vectors [N, D], fp32 on the CPU, of images [N, H, W, 3] uint8."""
        model, processor, _ = self._loaded

        def forward(batch: np.ndarray) -> BaseModelOutputWithPooling:
            pixels = processor(list(batch), return_tensors="pt", input_data_format="channels_last")
            return model.get_image_features(pixels.pixel_values.to(model.device, model.dtype))

        return self._in_batches(forward, images)

    def text_features(self, texts: Sequence[str]) -> Tensor:
        """Computes unit vectors [N, D], fp32 on the CPU, of texts; cuts a text that is too long."""
        model, _, tokenizer = self._loaded
        longest = model.config.text_config.max_position_embeddings

        def forward(batch: list[str]) -> BaseModelOutputWithPooling:
            tokens = tokenizer(
                batch, padding=True, truncation=True, max_length=longest, return_tensors="pt"
            )
            return model.get_text_features(**tokens.to(model.device))

        # The samples of a group share their prompt, so each text is encoded once.
        distinct = list(dict.fromkeys(texts))
        features = self._in_batches(forward, distinct)
        return features[[distinct.index(text) for text in texts]]

    @torch.inference_mode()
    def _in_batches(
        self, forward: Callable[[Inputs], BaseModelOutputWithPooling], inputs: Inputs
    ) -> Tensor:
        features = [
            forward(inputs[rows]).pooler_output.float()
            for rows in batches(len(inputs), self.batch_size)
        ]
        return torch.nn.functional.normalize(torch.cat(features), dim=1).cpu()

    @cached_property
    def _loaded(self) -> tuple[CLIPModel, CLIPImageProcessorPil, PreTrainedTokenizerBase]:
        """Loads the model, its image processor and its tokenizer."""
        from transformers import CLIPImageProcessorPil, CLIPModel

        return (
            self.load(CLIPModel, self._path),
            CLIPImageProcessorPil.from_pretrained(self._processor),
            load_tokenizer(self._processor),
        )
