"""A vision-language model behind an OpenAI-compatible endpoint, such as that of vLLM."""

from collections.abc import Sequence

from flowgrpo_rc.plugins import build
from flowgrpo_rc.rewards.base import check_range
from flowgrpo_rc.rewards.http.client import JsonClient, ServerError
from flowgrpo_rc.rewards.http.wire import encode_png
from flowgrpo_rc.rewards.vlm.base import Answer, Question, Vlm


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
