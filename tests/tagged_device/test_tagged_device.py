"""The tagged device behaves as a GPU does, and is gone afterwards."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from support.tagged_device import CUDA, TO_DEVICE, TO_HOST, WAIT, Record, tagged_device
from torch import Tensor, nn


@pytest.fixture
def record() -> Iterator[Record]:
    with tagged_device() as found:
        yield found


def here() -> Tensor:
    return torch.arange(3.0, device="cuda")


@pytest.mark.usefixtures("record")
def test_results_are_where_their_inputs_are() -> None:
    first, *rest = here()
    layer = nn.Linear(3, 2).to("cuda")
    assert isinstance(layer.weight, nn.Parameter)
    twin = copy.deepcopy(layer)
    layer(here()).sum().backward()
    found = [first, *rest, layer.weight, layer.weight.grad, twin.weight, here().topk(2).values]
    assert {tensor.device for tensor in found} == {CUDA}
    assert twin.weight.is_leaf
    assert twin.weight.requires_grad
    assert torch.zeros(2).device == layer.cpu().weight.device == torch.device("cpu")


REFUSED: dict[str, Callable[[], object]] = {
    "sum": lambda: here() + torch.zeros(3),
    "stack of scalars": lambda: torch.stack([here()[0], torch.tensor(1.0)]),
    "in place": lambda: torch.tensor(1.0).add_(here()[0]),
    "index": lambda: torch.zeros(3)[here().long()],
    "numpy": lambda: here().numpy(),
    "generator": lambda: torch.randn(3, device="cuda", generator=torch.Generator()),
    "gradient": lambda: setattr(here(), "grad", torch.zeros(3)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str, record: Record) -> None:
    with pytest.raises((RuntimeError, TypeError), match=r"cuda|cpu"):
        REFUSED[name]()
    assert len(record.refused) == 1


NOTED: dict[str, tuple[Callable[[], object], list[str]]] = {
    "a number of the host": (lambda: here() * torch.tensor(2.0), []),
    "item": (lambda: here().sum().item(), [WAIT]),
    "truth": (lambda: bool(here().any()), [WAIT]),
    "mask": (lambda: here()[here() > 1], [WAIT]),
    "fill by a mask": (lambda: here().__setitem__(here() > 1, 0.0), []),
    "index of the host": (lambda: here()[torch.tensor([1])], [TO_DEVICE]),
    "index of the device": (lambda: here()[here().long()], []),
    "to the host": (lambda: here().cpu(), [TO_HOST]),
    "from a list": (lambda: torch.tensor([1.0], device="cuda"), [TO_DEVICE]),
    "other precision": (lambda: here().to(torch.bfloat16), []),
}


@pytest.mark.parametrize("name", NOTED)
def test_what_is_noted(name: str, record: Record) -> None:
    call, kinds = NOTED[name]
    call()
    assert [event.kind for event in record.events.elements()] == kinds
