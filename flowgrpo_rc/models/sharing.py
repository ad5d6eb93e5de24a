"""Parts of a pipeline that the sampling and the training thread share, and that may leave the device when idle."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import nn

P = ParamSpec("P")
R = TypeVar("R")
IDLE = torch.device("cpu")


class Shared:
    """Modules that serve one call at a time: tokenizers refuse a second thread, and modules move.

    They are on `device`; with `offload` only for the duration of a call, and on the CPU otherwise.
    """

    def __init__(self, modules: Sequence[nn.Module], device: torch.device, *, offload: bool) -> None:
        self._modules, self._device, self._offload = modules, device, offload
        self._lock = threading.Lock()
        self._move(IDLE if offload else device)

    def during(self, call: Callable[P, R]) -> Callable[P, R]:
        """`call` as it is, but alone, and with the modules on the device."""

        @wraps(call)
        def alone(*args: P.args, **kwargs: P.kwargs) -> R:
            with self._lock:
                if not self._offload:
                    return call(*args, **kwargs)
                self._move(self._device)
                try:
                    return call(*args, **kwargs)
                finally:
                    self._move(IDLE)

        return alone

    def _move(self, device: torch.device) -> None:
        for module in self._modules:
            module.to(device)
