"""A dry run and a run make each object that the settings name once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.counted import MADE
from support.runs import Train

from flowgrpo_rc.correction.config import RolloutCorrectionConfig


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the losses and rewards that are made, and the corrections that are parsed."""
    MADE.clear()
    parse: Callable[[RolloutCorrectionConfig], Any] = RolloutCorrectionConfig.rules

    def rules(self: RolloutCorrectionConfig) -> Any:
        MADE["rules"] += 1
        return parse(self)

    monkeypatch.setattr(RolloutCorrectionConfig, "rules", rules)
    return MADE


@pytest.mark.parametrize("dry_run", [True, False])
def test_each_object_is_made_once(
    train: Train, counted: Counter[str], tmp_path: Path, dry_run: bool
) -> None:
    code = train(
        *(["--dry-run"] if dry_run else []),
        "actor.diffusion_loss.loss_mode=support.counted.CountedLoss",
        "actor.diffusion_loss.clip_ratio=1e-4",
        "+reward.terms.counted={_target_: support.counted.CountedReward}",
        "algorithm.rollout_correction.rollout_rs=token_k1",
        "algorithm.rollout_correction.rollout_rs_threshold=auto:4",
        f"trainer.output_dir={tmp_path / 'run'}",
    )
    assert code == 0
    # Translating the words of the documents parses them too: its message names those words.
    assert counted == {"loss": 1, "reward": 1, "rules": 2}
