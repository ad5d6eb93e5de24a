"""A vision-language model in this process: a Qwen2-VL or Qwen2.5-VL of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from flowgrpo_rc.rewards.backbones.checkpoint import (
    check_source,
    checkpoint_source,
    load_pretrained,
)
from flowgrpo_rc.rewards.backbones.qwen_vl import (
    Message,
    QwenVlReader,
    check_qwen_vl,
    message,
    plain,
)
from flowgrpo_rc.rewards.base import batches, check_range
from flowgrpo_rc.rewards.http.client import ServerError
from flowgrpo_rc.rewards.vlm.base import Answer, Question, Vlm

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel


@dataclass(kw_only=True, eq=False)
class LocalVlm(Vlm):
    """A model of this process, which loads at the first question."""

    path: str  # a local folder or a hub id; weights are read from safetensors only
    device: str = "auto"  # or cpu, cuda, cuda:1; auto: the GPU of this process, or the CPU
    dtype: str = "bf16"  # or fp32, fp16
    batch_size: int = 8  # questions in one forward
    max_tokens: int = 128  # of an answer

    def __post_init__(self) -> None:
        self._path = checkpoint_source(self.path, key="path")
        check_qwen_vl(self._path, device=self.device, dtype=self.dtype, batch_size=self.batch_size)
        check_range(1, max_tokens=self.max_tokens)

    def check(self) -> None:
        """Raises ValueError if the model can be had neither here nor from the Hub."""
        check_source(self._path)

    def answer(self, questions: Sequence[Question]) -> list[Answer | ServerError]:
        """Answers `batch_size` questions at a time, with the likeliest words."""
        answers: list[Answer | ServerError] = []
        for rows in batches(len(questions), self.batch_size):
            answers += self._answer(questions[rows])
        return answers

    @torch.inference_mode()
    def _answer(self, questions: Sequence[Question]) -> list[Answer]:
        model, reader, settings = self._loaded
        pictures = [picture for question in questions for picture in question.pictures]
        inputs = reader([_messages(question) for question in questions], pictures)
        inputs = {name: tensor.to(model.device) for name, tensor in inputs.items()}
        inputs["pixel_values"] = inputs["pixel_values"].to(model.dtype)
        said = model.generate(**inputs, generation_config=settings)
        said = said[:, inputs["input_ids"].shape[1] :]
        ends = torch.tensor(settings.eos_token_id, device=said.device)
        is_cut = ~torch.isin(said, ends).any(1)
        texts = reader.tokenizer.batch_decode(said, skip_special_tokens=True)
        return [Answer(text, cut) for text, cut in zip(texts, is_cut.tolist(), strict=True)]

    @cached_property
    def _loaded(self) -> tuple[PreTrainedModel, QwenVlReader, GenerationConfig]:
        """Loads the model, what prepares its inputs, and the settings of its answers."""
        from transformers import AutoModelForImageTextToText, GenerationConfig

        model = load_pretrained(
            AutoModelForImageTextToText, self._path, device=self.device, dtype=self.dtype
        )
        reader = QwenVlReader(
            self._path, image_token_id=model.config.image_token_id, padding_side="left"
        )
        # Settings of our own, since a checkpoint may come with those of sampling.
        settings = GenerationConfig(
            do_sample=False,
            max_new_tokens=self.max_tokens,
            eos_token_id=model.generation_config.eos_token_id,
            pad_token_id=reader.tokenizer.pad_token_id,
        )
        return model, reader, settings


def _messages(question: Question) -> list[Message]:
    messages = [message("user", plain(question.text), pictures=len(question.pictures))]
    for said, reply in question.turns:
        messages += [message("assistant", plain(said)), message("user", plain(reply))]
    return messages
