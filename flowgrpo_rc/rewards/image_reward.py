"""A reward for how people rate an image for its prompt: a BLIP that reads the prompt and the image.

Reference: ImageReward, https://arxiv.org/abs/2304.05977.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.reading import blaming
from flowgrpo_rc.rewards.aesthetic import linear_head
from flowgrpo_rc.rewards.backbones.checkpoint import LoadsModel, converted_folder, load_tokenizer
from flowgrpo_rc.rewards.base import Reward, Scores, batches

if TYPE_CHECKING:
    from transformers import CLIPImageProcessorPil, PreTrainedModel, PreTrainedTokenizerBase

    Processors = tuple[CLIPImageProcessorPil, PreTrainedTokenizerBase]

# Mean and standard deviation of the scores of the authors' data.
MEAN = 0.16717362830052426
STD = 1.0333394966054072
MAX_TOKENS = 35
FILES = ("config.json", "model.safetensors", "tokenizer_config.json")


@dataclass(kw_only=True, eq=False)
class ImageReward(LoadsModel, Reward):
    """ImageReward's score, standardised with its authors' mean and deviation, about -2 to 2.

    `path` is the folder that `examples/convert_reward.py image_reward` makes from the published
    checkpoint: the configuration of a BLIP, a BERT tokenizer, and model.safetensors with the names
    `vision_model.*`, `text_encoder.*` and `layers.*` (the head).
    """

    num_parameters = 445_278_720  # BLIP with a ViT-L/16

    batch_size: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        self._folder = converted_folder(self.path, FILES, "image_reward")

    def __call__(self, samples: np.ndarray, prompts: Sequence[Prompt]) -> Scores:
        texts = [prompt.text for prompt in prompts]
        rows = batches(len(samples), self.batch_size)
        scores = torch.cat([self._score(samples[chunk], texts[chunk]) for chunk in rows])
        return Scores(values=scores.tolist())

    @torch.inference_mode()
    def _score(self, images: np.ndarray, texts: Sequence[str]) -> Tensor:
        vision, text, head, (processor, tokenizer) = self._loaded
        pixels = processor(
            list(images), return_tensors="pt", input_data_format="channels_last"
        ).pixel_values
        seen = vision(pixels.to(vision.device, vision.dtype)).last_hidden_state
        tokens = tokenizer(
            list(texts),
            padding="max_length",
            truncation=True,
            max_length=MAX_TOKENS,
            return_tensors="pt",
        ).to(seen.device)
        read = text(
            input_ids=tokens.input_ids,
            attention_mask=tokens.attention_mask,
            encoder_hidden_states=seen,
            encoder_attention_mask=torch.ones(seen.shape[:2], dtype=torch.long, device=seen.device),
        ).last_hidden_state[:, 0]
        return (head(read.float().cpu()).squeeze(1) - MEAN) / STD

    @cached_property
    def _loaded(self) -> tuple[PreTrainedModel, PreTrainedModel, nn.Sequential, Processors]:
        """Loads both models, the head, the image processor and the tokenizer."""
        from transformers import BlipTextModel, BlipVisionModel, CLIPImageProcessorPil

        vision = self.load(
            BlipVisionModel,
            str(self._folder),
            spare=r"^(text_encoder|layers)\.",
            key_mapping={r"^vision_model\.": ""},
        )
        text = self.load(
            BlipTextModel,
            str(self._folder),
            spare=r"^(vision_model|layers)\.",
            key_mapping={r"^text_encoder\.": ""},
            add_pooling_layer=False,
        )
        file = self._folder / "model.safetensors"
        with blaming(f"path={self.path!r}: {file.name}"), safe_open(file, framework="pt") as stored:
            names = [name for name in stored.keys() if name.startswith("layers.")]  # noqa: SIM118
            head = linear_head({name: stored.get_tensor(name) for name in names})
        side = vision.config.image_size
        size = {"shortest_edge": side}
        processor = CLIPImageProcessorPil(size=size, crop_size={"height": side, "width": side})
        return vision, text, head, (processor, load_tokenizer(self._folder))
