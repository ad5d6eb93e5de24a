"""Parts of a pipeline that the sampling and the training thread share, and that may leave the
device when idle.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

IDLE = torch.device("cpu")


class Shared:
    """Modules that serve one thread at a time: tokenizers refuse a second one, and modules move.

    They are on `device`; with `offload` only while at work, and on the CPU otherwise.
    """

    def __init__(
        self, modules: Sequence[nn.Module], device: torch.device, *, offload: bool
    ) -> None:
        self._modules, self._device, self._offload = modules, device, offload
        self._lock = threading.Lock()
        self._move(IDLE if offload else device)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Alone, and with the modules on the device."""
        with self._lock:
            if not self._offload:
                yield
                return
            self._move(self._device)
            try:
                yield
            finally:
                self._move(IDLE)

    def _move(self, device: torch.device) -> None:
        for module in self._modules:
            module.to(device)
