"""Runs report only metrics that docs/metrics.md explains."""

from __future__ import annotations

from pathlib import Path

from metric_names import find
from support.runs import Train, Trained, read_rows

RC = "algorithm.rollout_correction"


def unknown_metrics(run_dir: Path) -> list[str]:
    names = {name for row in read_rows(run_dir) for name in row} - {"step"}
    assert len(names) > 60
    return sorted(name for name in names if find(name) is None)


def test_the_page_explains_every_metric_of_a_run_in_bypass_mode(trained: Trained) -> None:
    rules = ("rollout_rs=[token_k1,step_kl]", "rollout_rs_threshold=auto:4")
    settings = ("bypass_mode=true", "rollout_is=sequence", "metric_names=both", *rules)
    assert unknown_metrics(trained(*(f"{RC}.{setting}" for setting in settings))) == []


def test_the_page_explains_every_metric_of_a_run_in_decoupled_mode(
    train_text: Train, tmp_path: Path
) -> None:
    settings = (f"{RC}=decoupled_seq_is_rs", f"{RC}.metric_names=both", "rollout.staleness=1")
    assert train_text(*settings, "actor.use_kl_loss=true") == 0
    assert unknown_metrics(tmp_path / "run") == []
