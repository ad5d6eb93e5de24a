"""Models that the sampling and the training thread share; idle ones may leave the device."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

IDLE = torch.device("cpu")


class Shared:
    """Modules that serve one thread at a time, such as the text encoders or the VAE.

    Two threads at once would fail: tokenizers refuse a second one, and the modules move.

    Args:
      modules: the modules.
      device: where they work.
      offload: keep them on the CPU while nobody uses them.
    """

    def __init__(
        self, modules: Sequence[nn.Module], device: torch.device, *, offload: bool
    ) -> None:
        self._modules = modules
        self._device = device
        self._offload = offload
        self._lock = threading.Lock()
        self._move(IDLE if offload else device)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Gives the modules to the caller alone, on their device, inside the context."""
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
