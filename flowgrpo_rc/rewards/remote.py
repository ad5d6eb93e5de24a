"""Any reward behind HTTP: in another environment, on another card or another machine.

`flowgrpo-rc serve-reward` serves one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.plugins import build
from flowgrpo_rc.rewards.base import Reward, Scores
from flowgrpo_rc.rewards.http.client import JsonClient, ServerError
from flowgrpo_rc.rewards.http.wire import PATH, decode_scores, encode


class Remote(Reward):
    """The scores that a server gives, in the format of `rewards/http/wire.py`.

    Args:
      url: address of the server.
      part_names: parts of the answer that are logged.
      requires_target: True if every prompt must have a target text.
      batch_size: samples in one request.
      concurrency: requests at the same time.
      connection: `token_env`, `ca_file`, `deadline_s`, `max_attempts`, `max_pause_s`,
        `max_response_mb`, `max_failures` and `cooldown_s` of `JsonClient`. The deadline is for all
        requests of one chunk of samples together.
    """

    kind = "any"

    def __init__(
        self,
        *,
        url: str,
        part_names: Sequence[str] = (),
        requires_target: bool = False,
        batch_size: int = 16,
        concurrency: int = 1,
        **connection: Any,
    ) -> None:
        if batch_size < 1 or concurrency < 1:
            raise ValueError(
                f"batch_size={batch_size!r} and concurrency={concurrency!r} must be at least 1"
            )
        if isinstance(part_names, str):
            raise ValueError(f"part_names={part_names!r}: give a list, such as [{part_names}]")
        self.part_names = tuple(part_names)
        self.requires_target = requires_target
        self._batch_size = batch_size
        self._concurrency = concurrency
        self._client = build(JsonClient, {"url": url, **connection}, "connection")

    def check(self) -> None:
        """Raises ValueError if the server cannot be reached, or does not return the parts."""
        match self._client.probe(PATH):
            case {"part_names": [*offered]} if not set(self.part_names) <= set(offered):
                raise ValueError(
                    f"part_names={list(self.part_names)}: the server returns the parts {offered}"
                )

    def __call__(self, samples: Any, prompts: Sequence[Prompt]) -> Scores:
        starts = range(0, len(prompts), self._batch_size)
        chunks = [slice(start, start + self._batch_size) for start in starts]
        bodies = [encode(samples[chunk], prompts[chunk]) for chunk in chunks]
        answers = self._client.post_all(PATH, bodies, concurrency=self._concurrency)
        found = []
        for answer, chunk in zip(answers, chunks, strict=True):
            if isinstance(answer, ServerError):
                raise answer
            found.append(decode_scores(answer, self.part_names, len(prompts[chunk])))
        return Scores(
            values=[value for scores in found for value in scores.values],
            parts={
                name: [value for scores in found for value in scores.parts[name]]
                for name in self.part_names
            },
        )
