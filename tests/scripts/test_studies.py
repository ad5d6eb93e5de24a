"""The studies run, from their rollouts to their results."""

from __future__ import annotations

import sys
from pathlib import Path

import cached
import gradient_image
import gradient_study
import ladder
import learning
import pytest
from cells import load


def test_the_gradient_study_runs(tmp_path: Path) -> None:
    gradient_study.main(["--quick", "--output", str(tmp_path)])
    found = load("gradient", tmp_path)
    cell = found["regions_int4_16_0"]
    lost = {name: row[cell["columns"].index("lost")] for name, row in cell["first"].items()}
    assert lost["bypass_centered_none"] == lost["decoupled_centered_published"] == 0
    assert lost["bypass_centered_auto"] < 0.02
    assert lost["bypass_centered_published"] > 0.3
    row = cell["second"]["decoupled_centered_published"]
    assert row[cell["columns"].index("lost")] > 0.3
    estimators = found["bf16_16"]["estimators"]
    assert estimators["recomputed"]["gated"] == 0
    assert estimators["bypass"]["gated"] > 0.3
    assert estimators["bypass_token_k1"]["rejected"] == pytest.approx(0.05, abs=0.02)


def test_directions_are_judged_on_the_bundled_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradient_image, "JUDGED", 1)
    gradient_image.main(["--quick", "--output", str(tmp_path)])
    cell = load("gradient", tmp_path)["image_exact"]
    for reach in ("slopes", "further"):
        found = dict(cell[reach])
        guard = found.pop("guard_bypass_plain_none")
        # On exact rollouts all log-ratios are the same, and the direction raises the reward.
        assert len({tuple(slopes) for slopes in found.values()}) == 1
        assert found["bypass_plain_none"][0] > 0
        assert guard[0] > 0
        assert guard != found["bypass_plain_none"]


def test_the_learning_study_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["learning.py", "--quick", "--results", str(tmp_path)])
    learning.main()
    found = load(learning.STUDY, tmp_path)
    (name,) = (learning.Run(*cell, seed=1).name for cell in learning.QUICK_CELLS)
    fault = found[name]["curves"]
    assert all(len(curve) == 2 for curve in fault.values())
    assert fault["eff_sample_size"][0] < 0.999


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
