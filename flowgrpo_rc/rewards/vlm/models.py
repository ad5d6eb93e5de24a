"""Vision-language models that are shown pictures, asked a question, and answer in words.

One is a Qwen2-VL or Qwen2.5-VL of transformers in this process, the other stands behind an
OpenAI-compatible endpoint, such as that of vLLM.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from flowgrpo_rc.plugins import build
from flowgrpo_rc.rewards.backbones.checkpoint import LoadsModel, check_source, checkpoint_source
from flowgrpo_rc.rewards.backbones.qwen_vl import (
    Message,
    QwenVlReader,
    check_qwen_vl,
    message,
    plain,
)
from flowgrpo_rc.rewards.base import batches, check_range
from flowgrpo_rc.rewards.http.client import JsonClient, ServerError
from flowgrpo_rc.rewards.http.wire import encode_png

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A question about pictures."""

    pictures: Sequence[np.ndarray]  # uint8 RGB, [H, W, 3] each, in the order of the model's view
    text: str  # stands behind the pictures
    turns: tuple[tuple[str, str], ...] = ()  # what was said since: an answer and the reply to it


class Answer(NamedTuple):
    """Holds what a model said."""

    text: str
    is_cut: bool  # by the limit of its length


class Vlm(ABC):
    """A vision-language model. It always takes the likeliest word, so that answers repeat."""

    def check(self) -> None:  # noqa: B027 - a server is asked when the first samples are there
        """Raises ValueError if its files cannot be had. It is called before anything is loaded."""

    @abstractmethod
    def answer(self, questions: Sequence[Question]) -> list[Answer | ServerError]:
        """Returns the answer to each of N questions, or why it has none."""


@dataclass(kw_only=True, eq=False)
class LocalVlm(LoadsModel, Vlm):
    """A model of this process, which loads at the first question."""

    dtype: str = "bf16"
    batch_size: int = 8
    max_tokens: int = 128  # of an answer

    def __post_init__(self) -> None:
        super().__post_init__()
        self._path = checkpoint_source(self.path, key="path")
        check_qwen_vl(Path(self._path))
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

        model = self.load(AutoModelForImageTextToText, self._path)
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


class VlmServer(Vlm):
    """A model that answers at `URL/chat/completions`, for instance of `vllm serve MODEL`.

    Args:
      url: address of the API, such as http://127.0.0.1:8000/v1.
      model: name of the model on the server.
      max_tokens: longest answer.
      concurrency: questions at the same time.
      connection: the other options of `JsonClient`. Its deadline is for all questions of a call.
    """

    def __init__(
        self,
        *,
        url: str,
        model: str,
        max_tokens: int = 128,
        concurrency: int = 16,
        **connection: object,
    ) -> None:
        check_range(1, max_tokens=max_tokens, concurrency=concurrency)
        self._model = model
        self._max_tokens = max_tokens
        self._concurrency = concurrency
        self._client = build(JsonClient, {"url": url, **connection}, "connection")

    def answer(self, questions: Sequence[Question]) -> list[Answer | ServerError]:
        """Asks several questions at a time; a busy server is asked again by the client."""
        bodies = [self._request(question) for question in questions]
        path = "/chat/completions"
        replies = self._client.post_all(path, bodies, concurrency=self._concurrency)
        return [_answer(reply) for reply in replies]

    def _request(self, question: Question) -> dict[str, object]:
        urls = [f"data:image/png;base64,{encode_png(picture)}" for picture in question.pictures]
        content: list[object] = [
            *({"type": "image_url", "image_url": {"url": url}} for url in urls),
            {"type": "text", "text": question.text},
        ]
        messages: list[dict[str, object]] = [{"role": "user", "content": content}]
        for said, reply in question.turns:
            messages.append({"role": "assistant", "content": said})
            messages.append({"role": "user", "content": reply})
        return {
            "model": self._model,
            "messages": messages,
            "temperature": 0,
            "max_tokens": self._max_tokens,
        }


def _answer(reply: object) -> Answer | ServerError:
    """Returns the first choice of a chat completion."""
    match reply:
        case ServerError():
            return reply
        case {"choices": [{"message": {"content": str(text)}, **further}, *_]}:
            return Answer(text, further.get("finish_reason") == "length")
    return ServerError("the answer is no chat completion")
