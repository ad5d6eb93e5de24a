"""A video's score as the mean over its frames."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.rewards.base import Reward, Scores


def mean_over_frames(
    reward: Reward, videos: np.ndarray, prompts: Sequence[Prompt], every: int
) -> Scores:
    """What an image reward says of every `every`-th frame of videos [N, F, H, W, 3], averaged;
    parts likewise.
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
    if every < 1:
        raise ValueError(f"every={every!r} must be at least 1")
