"""The score of a video as the mean over its frames.

Shapes: N videos, F frames, H x W pixels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.plugins import build
from flowgrpo_rc.rewards.base import Reward, Scores, check_range


class FrameMean(Reward):
    """The mean score of every `every`-th frame of videos [N, F, H, W, 3], parts included.

    The other options are those of the image reward.
    """

    kind = "video"
    image_reward: ClassVar[type[Reward]]

    def __init__(self, *, every: int = 8, **options: object) -> None:
        check_range(1, every=every)
        self._every = every
        self._images: Reward = build(self.image_reward, options, self.image_reward.__name__)

    def settle(self, earlier: Mapping[str, object]) -> Mapping[str, object]:
        """Fills in what the image reward leaves to this machine."""
        return self._images.settle(earlier)

    def check(self) -> None:
        """Raises ValueError if the image reward lacks what it needs."""
        self._images.check()

    def check_prompt(self, prompt: Prompt) -> None:
        """Raises ValueError if the image reward cannot score samples of the prompt."""
        self._images.check_prompt(prompt)

    def __call__(self, samples: np.ndarray, prompts: Sequence[Prompt]) -> Scores:
        frames = samples[:, :: self._every]
        count = frames.shape[1]
        scores = self._images(
            frames.reshape(-1, *frames.shape[2:]),
            [prompt for prompt in prompts for _ in range(count)],
        )

        def mean(values: Sequence[float]) -> list[float]:
            return [*map(float, np.asarray(values).reshape(-1, count).mean(axis=1))]

        columns = {name: mean(values) for name, values in scores.parts.items()}
        return Scores(values=mean(scores.values), parts=columns)
