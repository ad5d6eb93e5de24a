"""Models and layers that work now and then; idle ones may leave the device."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from flowgrpo_rc.models.quantization import RestoredLinear, replace_layers

# Bytes that tensors share a pinned block of. torch rounds a block up to a power of two, so that
# tensors with a block each would take up to twice their size.
BLOCK = 2**31
_ALIGNMENT = 256


class HostLinear(RestoredLinear):
    """A linear layer whose weight stays on the host, and is copied for each product."""

    stored = "on_host"

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer)
        self.on_host = nn.Parameter(layer.weight.detach(), requires_grad=False)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """Copies the weight, [out, in]."""
        return self.fetched()


def keep_layers_on_host(network: nn.Module, device: torch.device) -> None:
    """Keeps the weights of the blocks' linear layers, or their codes, on the host: pinned for CUDA.

    The network may move to `device` afterwards without them. ValueError if there are none.
    """
    replace_layers(network, "model.offload_idle=layers", HostLinear)
    layers = [module for module in network.modules() if isinstance(module, RestoredLinear)]
    weights = [layer.get_parameter(layer.stored) for layer in layers]
    pin = device.type == "cuda" and torch.cuda.is_available()
    for layer, parameter, on_host in zip(layers, weights, packed(weights, pin=pin), strict=True):
        parameter.data = on_host  # frees what it was before the next one is copied
        layer.place = torch.empty(0)


class Offloadable:
    """Frozen modules that are on their device while they work, or without `offload` always.

    Nothing changes their tensors, so they are copied to the device and dropped there. On the host
    they lie in pinned memory, from which a GPU copies fastest.
    """

    def __init__(
        self, modules: Sequence[nn.Module], device: torch.device, *, offload: bool
    ) -> None:
        self._device = device
        self._users = 0
        if not offload:
            for module in modules:
                module.to(device)
        tensors = [t for module in modules for t in (*module.parameters(), *module.buffers())]
        pin = device.type == "cuda" and torch.cuda.is_available()
        if offload and pin:
            for tensor, on_host in zip(tensors, packed(tensors, pin=True), strict=True):
                tensor.data = on_host  # frees what it was before the next one is copied
        self._on_host = [(tensor, tensor.data) for tensor in tensors] if offload else []
        self._leave()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Has the modules on their device inside the context, which may hold others of its kind."""
        if self._users == 0:
            for tensor, on_host in self._on_host:
                tensor.data = on_host.to(self._device, non_blocking=True, copy=True)
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            if self._users == 0:
                self._leave()

    def _leave(self) -> None:
        for tensor, on_host in self._on_host:
            tensor.data = on_host


def packed(tensors: Sequence[Tensor], *, pin: bool) -> Iterator[Tensor]:
    """Yields a copy of each tensor, in order: views of few large blocks of the host's memory."""
    sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors]
    block = torch.empty(0, dtype=torch.uint8)
    start = 0
    for place, (tensor, size) in enumerate(zip(tensors, sizes, strict=True)):
        if start + size > len(block):
            left = sum(sizes[place:])
            block = torch.empty(max(size, min(left, BLOCK)), dtype=torch.uint8, pin_memory=pin)
            start = 0
        view = block[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        yield view.copy_(tensor.detach())
        start += size
