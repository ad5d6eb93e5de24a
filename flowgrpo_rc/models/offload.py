"""Models that work now and then, such as text encoders; idle ones may leave the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

IDLE = torch.device("cpu")


class Offloadable:
    """Modules that are on their device while they work.

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
        self._move(IDLE if offload else device)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Has the modules on their device inside the context."""
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
