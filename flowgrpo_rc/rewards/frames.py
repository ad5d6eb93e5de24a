"""The score of a video as the mean over its frames.

Shapes: N videos, F frames, H x W pixels.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.rewards.base import Reward, Scores


def mean_over_frames(
    reward: Reward, videos: np.ndarray, prompts: Sequence[Prompt], every: int
) -> Scores:
    """Scores every `every`-th frame with an image reward and averages over frames, parts included.

    Args:
      reward: scores images.
      videos: uint8, [N, F, H, W, 3].
      prompts: N prompts.
      every: distance between the frames that are scored.
    """
    frames = videos[:, ::every]
    count = frames.shape[1]
    scores = reward(
        frames.reshape(-1, *frames.shape[2:]), [prompt for prompt in prompts for _ in range(count)]
    )

    def mean(values: Sequence[float]) -> list[float]:
        averages: list[float] = np.asarray(values).reshape(-1, count).mean(axis=1).tolist()
        return averages

    return Scores(
        values=mean(scores.values), parts={name: mean(part) for name, part in scores.parts.items()}
    )


def check_every(every: int) -> None:
    """Raises ValueError for a distance between frames that is below 1."""
    if every < 1:
        raise ValueError(f"every={every!r} must be at least 1")
