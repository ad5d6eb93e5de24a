"""The exponential moving average of the LoRA, by diffusers' EMAModel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from diffusers.training_utils import EMAModel
from torch import nn


@dataclass(kw_only=True)
class EMAConfig:
    """The average of the LoRA, which is evaluated and exported.

    enable: without it the last weights are.
    decay: upper bound of min((1 + n) / (10 + n), decay) after n averages.
    update_interval: optimizer updates from one average to the next.
    """

    enable: bool = True
    decay: float = 0.9
    update_interval: int = 8

    def validate(self) -> None:
        """Raises ValueError for a wrong setting."""
        if not 0 <= self.decay < 1:
            raise ValueError(f"actor.ema.decay={self.decay}: give a number from 0 to below 1")
        if self.update_interval < 1:
            raise ValueError(f"actor.ema.update_interval={self.update_interval}: give at least 1")


@contextmanager
def averaged_weights(ema: EMAModel | None, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Puts the average into the parameters, and their own values back at the end, bit for bit."""
    if ema is None:
        yield
        return
    ema.store(parameters)
    ema.copy_to(parameters)
    try:
        yield
    finally:
        ema.restore(parameters)
