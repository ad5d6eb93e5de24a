"""A reward for how well a vision-language model reads the target text in an image.

The model answers at an OpenAI-compatible endpoint, for instance
`vllm serve Qwen/Qwen2.5-VL-7B-Instruct`. It reads text that the small models of `ocr` cannot.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.plugins import build
from flowgrpo_rc.rewards.base import Reward, Scores
from flowgrpo_rc.rewards.http.client import JsonClient, ServerError
from flowgrpo_rc.rewards.http.wire import encode_png
from flowgrpo_rc.rewards.ocr import OCR, ocr_score, target_of

INSTRUCTION = (
    "Write down the text in this image exactly as it stands there, mistakes included. Answer with "
    "that text alone, and with nothing if there is no text."
)
logger = logging.getLogger(__name__)


class VlmOCR(Reward):
    """The `ocr_score` of what the model reads, with the parts of the `ocr` reward.

    An image without an answer has no score.

    Args:
      url: address of the API, such as http://127.0.0.1:8000/v1.
      model: name of the model on the server.
      instruction: what the model is told to do.
      max_tokens: longest answer.
      concurrency: images at the same time.
      connection: `token_env`, `ca_file`, `deadline_s`, `max_attempts`, `max_pause_s`,
        `max_response_mb`, `max_failures` and `cooldown_s` of `JsonClient`. The deadline is for all
        images of one chunk together.

    Raises:
      ValueError: a number is below 1, or `JsonClient` refuses an option. When called: a prompt has
        no target.
      ServerError: when called, no image has an answer.
    """

    part_names = OCR.part_names
    requires_target = True

    def __init__(
        self,
        *,
        url: str,
        model: str,
        instruction: str = INSTRUCTION,
        max_tokens: int = 128,
        concurrency: int = 16,
        **connection: Any,
    ) -> None:
        if max_tokens < 1 or concurrency < 1:
            raise ValueError(
                f"max_tokens={max_tokens!r} and concurrency={concurrency!r} must be at least 1"
            )
        self._model = model
        self._instruction = instruction
        self._max_tokens = max_tokens
        self._concurrency = concurrency
        self._client = build(JsonClient, {"url": url, **connection}, "connection")

    def check(self) -> None:
        """Raises ValueError if the server cannot be reached, or serves other models."""
        match self._client.probe("/models"):
            case {"data": [*served]}:
                names = [str(model.get("id")) for model in served if isinstance(model, dict)]
                if self._model not in names:
                    raise ValueError(f"model={self._model}: the server has {', '.join(names)}")

    def __call__(self, samples: np.ndarray, prompts: Sequence[Prompt]) -> Scores:
        targets = [target_of(prompt) for prompt in prompts]
        bodies = [self._request(image) for image in samples]
        answers = self._client.post_all("/chat/completions", bodies, concurrency=self._concurrency)
        texts = [answer if isinstance(answer, ServerError) else _text(answer) for answer in answers]
        failures = [text for text in texts if isinstance(text, ServerError)]
        if len(failures) == len(texts):
            raise failures[0]
        if failures:
            logger.warning(
                "%d of %d images have no answer: %s", len(failures), len(texts), failures[0]
            )
        columns: dict[str, list[float]] = {name: [] for name in ("reward", *self.part_names)}
        for text, target in zip(texts, targets, strict=True):
            score = None if isinstance(text, ServerError) else ocr_score(text, target)
            for name, column in columns.items():
                column.append(math.nan if score is None else getattr(score, name))
        return Scores(values=columns.pop("reward"), parts=columns)

    def _request(self, image: np.ndarray) -> dict[str, Any]:
        picture = {
            "type": "image_url",
            "image_url": {"url": f"data:image/png;base64,{encode_png(image)}"},
        }
        content = [picture, {"type": "text", "text": self._instruction}]
        messages = [{"role": "user", "content": content}]
        return {
            "model": self._model,
            "messages": messages,
            "temperature": 0,
            "max_tokens": self._max_tokens,
        }


def _text(answer: Any) -> str | ServerError:
    """Returns the first choice of a chat completion without its whitespace.

    Or a ServerError if there is none.
    """
    match answer:
        case {"choices": [{"message": {"content": str(text)}}, *_]}:
            # An answer of several lines is one text, as that of `ocr` is.
            return "".join(text.split())
    return ServerError("the answer is no chat completion")
