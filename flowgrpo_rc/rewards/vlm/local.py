"""A vision-language model in this process: a Qwen2-VL or Qwen2.5-VL of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch

from flowgrpo_rc.rewards.backbones.checkpoint import checkpoint_source, load_pretrained
from flowgrpo_rc.rewards.backbones.qwen_vl import QwenVlReader, check_qwen_vl, plain
from flowgrpo_rc.rewards.vlm.base import Answer, Question, Vlm, VlmError


class _LoadedVlm(NamedTuple):
    model: Any
    reader: QwenVlReader
    settings: Any


class LocalVlm(Vlm):
    """A model of this process, which loads at the first question.

    Args:
      path: a local folder or a hub id; weights are read from safetensors only.
      device: auto (the GPU of this process, or the CPU), cpu, cuda, cuda:1.
      dtype: fp32, bf16 or fp16.
      batch_size: questions in one forward.
      max_tokens: longest answer.
    """

    def __init__(
        self,
        *,
        path: str,
        device: str = "auto",
        dtype: str = "bf16",
        batch_size: int = 8,
        max_tokens: int = 128,
    ) -> None:
        self._path = checkpoint_source(path, key="path")
        check_qwen_vl(self._path, device=device, dtype=dtype, batch_size=batch_size)
        if max_tokens < 1:
            raise ValueError(f"max_tokens={max_tokens!r} must be at least 1")
        self._device = device
        self._dtype = dtype
        self._batch_size = batch_size
        self._max_tokens = max_tokens

    def answer(self, questions: Sequence[Question]) -> list[Answer | VlmError]:
        """Answers `batch_size` questions at a time, with the likeliest words."""
        answers: list[Answer | VlmError] = []
        for start in range(0, len(questions), self._batch_size):
            answers += self._answer(questions[start : start + self._batch_size])
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
    def _loaded(self) -> _LoadedVlm:
        from transformers import AutoModelForImageTextToText, GenerationConfig

        model = load_pretrained(
            AutoModelForImageTextToText, self._path, device=self._device, dtype=self._dtype
        )
        reader = QwenVlReader(
            self._path, image_token_id=model.config.image_token_id, padding_side="left"
        )
        # Settings of our own, since a checkpoint may come with those of sampling.
        settings = GenerationConfig(
            do_sample=False,
            max_new_tokens=self._max_tokens,
            eos_token_id=model.generation_config.eos_token_id,
            pad_token_id=reader.tokenizer.pad_token_id,
        )
        return _LoadedVlm(model, reader, settings)


def _messages(question: Question) -> list[dict[str, Any]]:
    content: list[dict[str, Any]] = [{"type": "image"} for _ in question.pictures]
    content.append({"type": "text", "text": plain(question.text)})
    messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
    for said, reply in question.turns:
        messages += [
            {"role": "assistant", "content": [{"type": "text", "text": plain(said)}]},
            {"role": "user", "content": [{"type": "text", "text": plain(reply)}]},
        ]
    return messages
