"""What a reward is. One file in this folder is one reward; see `docs` for adding one out of the
tree.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import numpy as np
from torch import Tensor

from flowgrpo_rc.batch import Prompt

KINDS = ("image", "video", "text", "latent", "any")
Samples = np.ndarray | Sequence[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """values: one float per sample; parts: further numbers per sample that are logged but not
    optimized.

    A sample that could not be scored has the value NaN: it leaves the batch, where a 0 would teach
    the policy.
    """

    values: Sequence[float]
    parts: Mapping[str, Sequence[float]] = field(default_factory=dict)


def finite_numbers(values: Sequence[float] | np.ndarray | Tensor) -> list[float]:
    """What a reward returned, as plain numbers: NaN in place of whatever is no finite number, None
    included.
    """
    plain = values.tolist() if isinstance(values, (np.ndarray, Tensor)) else list(values)
    return [
        float(value) if isinstance(value, Real) and math.isfinite(value) else math.nan
        for value in plain
    ]


class Reward(ABC):
    """Scores samples. Constructed once per process; called from a worker thread while sampling goes
    on.

    The constructor's keyword parameters are the options of the configuration. It checks them and
    returns at once: what is heavy loads at the first call. Calls to one reward never overlap.

    kind: what it scores, "image", "video" or "text", or "any" for all of them; "latent" for what an
        image or a video is decoded from. Where all rewards of a run are latent, nothing is decoded
        for training.
    part_names: the keys of `Scores.parts`, known in advance so that every process logs the same
        names.
    requires_target: True if every prompt must have a target text.
    """

    kind: str = "image"
    part_names: tuple[str, ...] = ()
    requires_target: bool = False

    @abstractmethod
    def __call__(self, samples: Any, prompts: Sequence[Prompt]) -> Scores:
        """Score N samples of N `prompts`: images [N, H, W, 3] or videos [N, F, H, W, 3] uint8 RGB,
        texts, or latents [N, ...], a tensor on the model's device in the shape and precision in
        which the model denoises them."""
