"""Prepares what a Qwen2-VL or Qwen2.5-VL reads: conversations with pictures, as tensors.

The processor of transformers would do the same, but it needs torchvision, for videos.

Shapes: N conversations, L tokens of the longest one.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from flowgrpo_rc.reading import read_mapping
from flowgrpo_rc.rewards.backbones.checkpoint import load_tokenizer

FAMILIES = ("qwen2_vl", "qwen2_5_vl")
Message = Mapping[str, object]


def check_qwen_vl(folder: Path) -> None:
    """Raises ValueError if a folder holds another model; what is none is a hub id."""
    if folder.is_dir():
        family = read_mapping(folder / "config.json").get("model_type")
        if family not in FAMILIES:
            raise ValueError(
                f"path={str(folder)!r} holds a {family}; allowed are {', '.join(FAMILIES)}. A "
                "server can serve others: give url and model"
            )


def plain(text: str) -> str:
    """Returns a text in which no special token stands, such as that of a picture."""
    return text.replace("<|", "< |")


def message(role: str, text: str, *, pictures: int = 0) -> Message:
    """Returns a message of some pictures and a text after them."""
    content: list[dict[str, str]] = [{"type": "image"}] * pictures
    return {"role": role, "content": [*content, {"type": "text", "text": text}]}


class QwenVlReader:
    """Reads conversations with pictures; loads tokenizer and image processor at once.

    The padding is left for a model that goes on, right for one that reads alone. Pictures are
    scaled to `num_pixels`, or to the limits of the checkpoint.
    """

    def __init__(
        self, path: str, *, image_token_id: int, padding_side: str, num_pixels: int | None = None
    ) -> None:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
            Qwen2VLImageProcessorPil,
        )

        size = {}
        if num_pixels is not None:
            size = {"size": {"shortest_edge": num_pixels, "longest_edge": num_pixels}}
        self._images = Qwen2VLImageProcessorPil.from_pretrained(path, **size)
        self.tokenizer = load_tokenizer(path)
        self._padding_side = padding_side
        self._image_token_id = image_token_id
        self._image_token = self.tokenizer.convert_ids_to_tokens(image_token_id)

    def __call__(
        self, conversations: Sequence[Sequence[Message]], pictures: Sequence[np.ndarray]
    ) -> dict[str, torch.Tensor]:
        """Makes the tensors of N conversations from the pictures of all of them in order."""
        seen = self._images(list(pictures), return_tensors="pt", input_data_format="channels_last")
        # A picture is as many tokens as it has patches, after they are merged.
        counts = iter((seen.image_grid_thw.prod(1) // self._images.merge_size**2).tolist())
        texts = []
        for messages in conversations:
            text = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
            first, *rest = text.split(self._image_token)
            texts.append(
                first + "".join(self._image_token * next(counts) + piece for piece in rest)
            )
        tokens = self.tokenizer(
            texts, padding=True, padding_side=self._padding_side, return_tensors="pt"
        )
        return {
            "input_ids": tokens.input_ids,
            "attention_mask": tokens.attention_mask,
            "mm_token_type_ids": (tokens.input_ids == self._image_token_id).int(),
            "pixel_values": seen.pixel_values,
            "image_grid_thw": seen.image_grid_thw,
        }
