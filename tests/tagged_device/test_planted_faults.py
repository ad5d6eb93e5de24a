"""Plants in the package what would fail on a GPU or slow it down; it is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tagged_runs import IMAGES, train, two_ranks, wrong
from torch import Tensor

from flowgrpo_rc.losses.base import denominator
from flowgrpo_rc.policies.flow import FlowPolicy
from flowgrpo_rc.training import update

ONE_STEP = (*IMAGES, "trainer.total_training_steps=1", "trainer.val_before_train=false")


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Has a function called on each piece of a micro-batch."""
    evaluate = FlowPolicy.evaluate

    def planted(harm: Any) -> None:
        def harmed(self: FlowPolicy, piece: Any) -> Any:
            harm(piece)
            return evaluate(self, piece)

        monkeypatch.setattr(FlowPolicy, "evaluate", harmed)

    return planted


def test_an_index_of_the_host(plant: Any, tmp_path: Path) -> None:
    plant(lambda piece: piece.sigmas[torch.arange(2)])
    assert "__getitem__" in " ".join(wrong(train(tmp_path, ONE_STEP)))


def test_a_number_is_read(plant: Any, tmp_path: Path) -> None:
    plant(lambda piece: piece.sigmas.sum().item())
    assert "item" in " ".join(wrong(train(tmp_path, ONE_STEP)))


def test_numpy_of_a_tensor_of_the_device(plant: Any, tmp_path: Path) -> None:
    plant(lambda piece: piece.sigmas.numpy())
    with pytest.raises(TypeError, match="can't convert cuda:0"):
        train(tmp_path, ONE_STEP)


def test_tensors_of_both_devices(plant: Any, tmp_path: Path) -> None:
    plant(lambda piece: piece.sigmas + torch.zeros_like(piece.sigmas, device="cpu"))
    with pytest.raises(RuntimeError, match="on the same device, but found cuda:0 and cpu"):
        train(tmp_path, ONE_STEP)


def test_a_tensor_of_the_host_in_a_collective(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def planted(parts: Tensor, all_reduce: Any) -> Tensor:
        return denominator(parts.cpu(), all_reduce)

    monkeypatch.setattr(update, "denominator", planted)
    with two_ranks(), pytest.raises(RuntimeError, match="device type cpu"):
        train(tmp_path, ONE_STEP)
