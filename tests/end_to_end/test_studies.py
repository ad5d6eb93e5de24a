"""The studies run, and go on where they were interrupted."""

from __future__ import annotations

import sys
from pathlib import Path

import gradient_image
import gradient_study
import ladder
import learning
import pytest
from cells import load, save


def forget(study: str, name: str, folder: Path) -> None:
    file = folder / f"{study}.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(line for line in lines if f'"name": "{name}"' not in line))


def test_the_gradient_study_runs_and_goes_on_where_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gradient_study.main(["--quick", "--output", str(tmp_path)])
    names = [f"regions_{name}_16_0" for name in ("truth", "int4", "int4x2")]
    assert capsys.readouterr().out.split() == [*names, "truth_16", "bf16_16"]
    found = load("gradient", tmp_path)
    cell = found["regions_int4_16_0"]
    lost = {name: row[cell["columns"].index("lost")] for name, row in cell["first"].items()}
    assert lost["bypass_centered_none"] == lost["decoupled_centered_published"] == 0
    assert lost["bypass_centered_auto"] < 0.02
    assert lost["bypass_centered_published"] > 0.3
    row = cell["second"]["decoupled_centered_published"]
    assert row[cell["columns"].index("lost")] > 0.3
    cell = found["bf16_16"]
    assert cell["estimators"]["recomputed"]["gated"] == 0
    assert cell["estimators"]["bypass"]["gated"] > 0.3
    assert cell["estimators"]["bypass_token_k1"]["rejected"] == pytest.approx(0.05, abs=0.02)
    forget("gradient", "truth_16", tmp_path)
    gradient_study.main(["--quick", "--output", str(tmp_path)])
    assert capsys.readouterr().out.split() == ["truth_16"]


def test_directions_are_judged_on_the_bundled_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gradient_image.main(["--quick", "--output", str(tmp_path)])
    assert capsys.readouterr().out.split() == ["image_exact"]
    cell = load("gradient", tmp_path)["image_exact"]
    for reach in ("slopes", "further"):
        found = dict(cell[reach])
        guard = found.pop("guard_bypass_plain_none")
        # On exact rollouts all log-ratios are the same, and the direction raises the reward.
        assert len({tuple(slopes) for slopes in found.values()}) == 1
        assert found["bypass_plain_none"][0] > 0
        assert guard[0] > 0
        assert guard != found["bypass_plain_none"]


def test_the_learning_study_runs_and_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(sys, "argv", ["learning.py", "--quick", "--results", str(tmp_path)])
    first, second = (learning.Run(*cell, seed=1).name for cell in learning.QUICK_CELLS)
    save(learning.STUDY, second, {}, tmp_path)
    learning.main()
    assert capsys.readouterr().out.split() == [first]
    forget(learning.STUDY, second, tmp_path)
    learning.main()
    assert capsys.readouterr().out.split() == [second]
    found = load(learning.STUDY, tmp_path)
    clean, fault = (found[name]["curves"] for name in (first, second))
    assert all(len(curve) == 2 for curve in (*clean.values(), *fault.values()))
    assert fault["eff_sample_size"][0] < 0.999
    assert found[first]["before"] == found[second]["before"]


def test_the_ladder_trains_on_rollouts_that_are_worse(tmp_path: Path) -> None:
    ladder.main(["--quick", "--results", str(tmp_path)])
    found = load(ladder.STUDY, tmp_path)
    sizes = {cell["rollout"]: max(cell["curves"]["mismatch"]) for cell in found.values()}
    assert sizes.keys() == {rollout for rollout, _ in ladder.QUICK_CELLS}
    assert all(size > 5e-4 for size in sizes.values())  # bf16 has 1e-4
