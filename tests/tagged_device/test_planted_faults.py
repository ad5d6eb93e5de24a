"""Plants in the package what would fail on a GPU or slow it down; it is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tagged_runs import ONE_STEP, train, two_ranks, wrong
from torch import Tensor

from flowgrpo_rc.losses.base import denominator
from flowgrpo_rc.policies.flow import FlowPolicy
from flowgrpo_rc.training import update


def test_an_index_of_the_host_and_a_number_that_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    evaluate = FlowPolicy.evaluate

    def harmed(self: FlowPolicy, piece: Any) -> Any:
        piece.sigmas[torch.arange(2)].sum().item()
        return evaluate(self, piece)

    monkeypatch.setattr(FlowPolicy, "evaluate", harmed)
    found = " ".join(wrong(train(tmp_path, ONE_STEP)))
    assert "call='__getitem__ by an index of the host'" in found
    assert "call='item'" in found


def test_a_tensor_of_the_host_in_a_collective(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def planted(parts: Tensor, all_reduce: Any) -> Tensor:
        return denominator(parts.cpu(), all_reduce)

    monkeypatch.setattr(update, "denominator", planted)
    with two_ranks(), pytest.raises(RuntimeError, match="device type cpu"):
        train(tmp_path, ONE_STEP)
