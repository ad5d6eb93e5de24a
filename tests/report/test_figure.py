"""The figure that `plot_rollout_correction` draws."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from flowgrpo_rc.report.figure import plot_rollout_correction


def test_plot_of_rows_and_of_a_file_agree_in_either_mode(tmp_path: Path) -> None:
    names = [f"rollout_is_{name}" for name in ("mean", "eff_sample_size", "veto_fraction")]
    names += ["kl", "ppl_ratio", "chi2_token"]
    bypass, decoupled = (
        [{"step": step} | {prefix + name: 0.1 * step for name in names} for step in range(3)]
        for prefix in ("actor/rollout_corr/", "rollout_corr/")
    )
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in decoupled))
    paths = [
        plot_rollout_correction(bypass, tmp_path / "rows.png"),
        plot_rollout_correction(tmp_path / "metrics.jsonl", tmp_path / "file.png"),
    ]
    drawn = [np.asarray(Image.open(path).convert("RGB")) for path in paths]
    assert np.array_equal(*drawn)
    assert drawn[0].shape[1] > 1000
    assert (drawn[0] == (31, 119, 180)).all(-1).sum() > 6 * 100


def test_plot_without_correction_metrics_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no row of the history"):
        plot_rollout_correction([{"step": 1, "reward/mean": 1.0}], tmp_path / "plot.png")
