"""The report of a run, from fabricated run folders."""

from __future__ import annotations

import base64
import math
from pathlib import Path

import pytest
from support.report_pages import Page, make_run

from flowgrpo_rc.report.run import write_report

SECTIONS = [
    "summary",
    "reward",
    "samples",
    "health",
    "correction",
    "timesteps",
    "histograms",
    "rejected",
    "update",
]
SECTIONS += ["timing", "config", "environment", "checkpoints"]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_report(make_run(tmp_path_factory.mktemp("run"))).read_text()


def test_page_stands_alone_and_has_every_section(report: str) -> None:
    page = Page(report)
    assert page.ids == SECTIONS
    assert page.references
    assert all(reference.startswith("data:image/png;base64,") for reference in page.references)
    assert not {"script", "link", "iframe", "object", "base"} & set(page.tags)
    style = report[report.index("<style>") : report.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style
    assert "prefers-color-scheme: dark" in style


def test_page_escapes_and_redacts(report: str) -> None:
    text = "".join(Page(report).text)
    assert "ocr <b>bypass</b>" in text
    assert "<b>bypass" not in report
    assert "kl is 0.2 <script>alert(1)</script>" in text
    assert "<script" not in report
    assert "hunter" not in report


def test_page_tells_the_outcome(report: str) -> None:
    text = "".join(Page(report).text)
    last = 0.412 + 0.25 * (1 - math.exp(-60 / 25))
    assert f"Held-out reward 0.4120 \u2192 {last:.4f} (+{last - 0.412:.4f})" in text
    assert "Training steps: 60" in text
    assert "Step 0" in text
    assert "Step 60" in text
    assert "Step 20" not in text
    assert "step_20" in text
    assert "1.9 MiB" in text
    assert "step_61" not in text
    # 60 steps of 2.0, 2.6 and 0.5 s; the total is left out.
    assert "3 min, 51%" in text
    assert "2 min, 39%" in text
    assert "30.0 s, 10%" in text


def test_before_and_after_grids_are_the_files(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    references = Page(write_report(run).read_text()).references
    files = [run / "samples" / f"step_{step:06d}.png" for step in (0, 60)]
    assert references[:2] == [
        f"data:image/png;base64,{base64.b64encode(file.read_bytes()).decode()}" for file in files
    ]


def test_report_is_deterministic(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    first = write_report(run).read_bytes()
    assert write_report(run).read_bytes() == first
    assert sorted(path.name for path in run.iterdir() if path.name.startswith(".")) == []


@pytest.mark.parametrize(
    "rows",
    [
        "",
        '{"step": 0, "val/reward": 0.4}\n',
        '{"step": 1, "reward/mean": 0.5}\n{"step": 2, "reward/me',
        '{"step": 1, "reward/mean": null, "actor/lr": 0.0, "timing_s/update": null}\n',
        '{"step": 1, "rollout_corr/logprob_abs_diff/ts_900": 0.0, "rollout_corr/kl": 0.0}\n',
    ],
    ids=["no rows", "only evaluated", "killed", "not finite", "exact replay"],
)
def test_incomplete_runs_have_a_report(tmp_path: Path, rows: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(rows)
    page = Page(write_report(tmp_path).read_text())
    assert page.ids == SECTIONS
    assert not page.references


def test_stopped_run_says_how_far_it_came(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 3, "reward/mean": 0.5}\n{"step": 4, "reward/mean": 0.6}\n'
    )
    (tmp_path / "config.yaml").write_text("trainer:\n  total_training_steps: 9\n")
    text = "".join(Page(write_report(tmp_path).read_text()).text)
    assert "Not evaluated yet; training reward 0.5000 \u2192 0.6000 (+0.1000)" in text
    assert "Training steps: 4 of 9" in text


def test_folder_without_metrics_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is not the folder of a run: it has no metrics\.jsonl"):
        write_report(tmp_path)
