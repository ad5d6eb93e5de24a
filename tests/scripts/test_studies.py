"""The studies run, from their rollouts to their results."""

from __future__ import annotations

from pathlib import Path

import cached
import ladder
import pytest
from cells import load


def test_the_ladder_trains_on_rollouts_that_are_worse(tmp_path: Path) -> None:
    ladder.main(["--quick", "--results", str(tmp_path)])
    found = load(ladder.STUDY, tmp_path)
    sizes = {cell["rollout"]: max(cell["curves"]["mismatch"]) for cell in found.values()}
    assert sizes.keys() == {rollout for rollout, _ in ladder.QUICK_CELLS}
    assert all(size > 5e-4 for size in sizes.values())  # bf16 has 1e-4


def test_a_cached_rollout_trains(tmp_path: Path) -> None:
    cached.main(["--quick", "--results", str(tmp_path)])
    (cell,) = load(cached.STUDY, tmp_path).values()
    # 2 of 4 blocks at 3 of 7 evaluations
    assert cell["curves"]["saved_blocks"] == pytest.approx([3 / 14] * 2, rel=1e-4)
