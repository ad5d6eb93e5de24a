"""Any reward behind HTTP: in another environment, on another card or another machine.

`flowgrpo-rc serve-reward` serves one.
"""

import json
from collections.abc import Sequence

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.plugins import build
from flowgrpo_rc.rewards.base import Reward, Samples, Scores, batches, check_range
from flowgrpo_rc.rewards.http.client import JsonClient
from flowgrpo_rc.rewards.http.wire import PATH, decode_scores, encode


class Remote(Reward):
    """The scores that a server gives, in the format of `rewards/http/wire.py`.

    Args:
      url: address of the server.
      part_names: parts of the answer that are logged.
      requires_target: True if every prompt must have a target text.
      batch_size: samples in one request.
      concurrency: requests at the same time.
      connection: the other options of `JsonClient`. Its deadline is for one chunk of samples.
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
        **connection: object,
    ) -> None:
        check_range(1, batch_size=batch_size, concurrency=concurrency)
        if isinstance(part_names, str):
            raise ValueError(f"part_names={part_names!r}: give a list, such as [{part_names}]")
        self.part_names = tuple(part_names)
        self.requires_target = requires_target
        self._batch_size = batch_size
        self._concurrency = concurrency
        self._client = build(JsonClient, {"url": url, **connection}, "connection")

    def check_prompt(self, prompt: Prompt) -> None:
        """Raises ValueError if JSON has no form for the prompt's metadata."""
        try:
            json.dumps(dict(prompt.metadata), allow_nan=False)
        except (TypeError, ValueError) as error:
            remedy = "drop that column, or make it text"
            raise ValueError(f"its metadata cannot be sent as JSON: {error}: {remedy}") from error

    def __call__(self, samples: Samples, prompts: Sequence[Prompt]) -> Scores:
        chunks = batches(len(prompts), self._batch_size)
        bodies = [encode(samples[chunk], prompts[chunk]) for chunk in chunks]
        answers = self._client.post_each(PATH, bodies, concurrency=self._concurrency)
        chunk_scores = [
            decode_scores(answer, self.part_names, len(prompts[chunk]))
            for answer, chunk in zip(answers, chunks, strict=True)
        ]
        return Scores(
            values=[value for scores in chunk_scores for value in scores.values],
            parts={
                name: [value for scores in chunk_scores for value in scores.parts[name]]
                for name in self.part_names
            },
        )
