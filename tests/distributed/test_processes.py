"""One process or two: the same noise, the same images. What is then learned:
test_distributed.py.
"""

from __future__ import annotations

import pytest
from support.runs import Train


def test_a_number_of_processes_that_does_not_fit(
    train: Train, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert train("actor.ppo_mini_batch_size=1") == 2
    assert "actor.ppo_mini_batch_size=1" in capsys.readouterr().err
