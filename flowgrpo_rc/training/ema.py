"""The exponential moving average of the LoRA, by diffusers' EMAModel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from diffusers.training_utils import EMAModel
from torch import nn


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
