"""A number of processes that does not fit the batch is refused."""

from __future__ import annotations

import pytest
from support.runs import Train


def test_a_number_of_processes_that_does_not_fit(
    train: Train, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert train("actor.ppo_mini_batch_size=1") == 2
    assert "actor.ppo_mini_batch_size=1" in capsys.readouterr().err
