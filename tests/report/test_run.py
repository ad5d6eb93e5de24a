"""The report of a run, from fabricated run folders."""

from __future__ import annotations

import base64
import io
import math
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.report_pages import Page, chart_data, make_run, visible_text, write_rows

from flowgrpo_rc.records.samples import save_grid
from flowgrpo_rc.report.run import write_report

SECTIONS = ["samples", "reward", "health", "correction", "timesteps", "rejected", "update"]
SECTIONS += ["timing", "config", "environment", "checkpoints", "words"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with its report, for tests that only read them."""
    folder = make_run(tmp_path_factory.mktemp("run"))
    write_report(folder)
    return folder


@pytest.fixture(scope="module")
def report(run: Path) -> str:
    return (run / "report.html").read_text()


def test_page_stands_alone_and_has_every_section(report: str) -> None:
    page = Page(report)
    assert [name for name in page.ids if not name.startswith("word-")] == SECTIONS
    assert len(page.references) == 16 + 12
    assert all(reference.startswith("data:image/png;base64,") for reference in page.references)
    words = {name for name in page.ids if name.startswith("word-")}
    assert words == set(re.findall(r'href="#(word-\w+)"', report))
    assert "The curves need JavaScript" in report.split("<noscript>")[1].split("</noscript>")[0]


def test_page_escapes_and_redacts(report: str) -> None:
    text = visible_text(report)
    assert "ocr <b>bypass</b>" in text
    assert "<b>bypass" not in report
    assert "kl is 0.2 <script>alert(1)</script>" in text
    assert "<script>alert" not in report
    assert "hunter" not in report


def test_page_tells_the_outcome(report: str) -> None:
    text = visible_text(report)
    last = 0.412 + 0.25 * (1 - math.exp(-60 / 25))
    assert f"Held-out reward 0.4120 \u2192 {last:.4f} (+{last - 0.412:.4f})" in text
    assert "Training steps: 60" in text
    facts = re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", report.replace("<wbr>", ""), re.DOTALL)
    assert [(visible_text(name).strip(), value) for name, value in facts[:5]] == [
        ("Model", "sd3"),
        ("Mode", "bypass, why"),
        ("Started", "2026-01-02 03:04 UTC"),
        ("Ran on", "cpu, 2 processes"),
        ("Versions", "flowgrpo-rc 0.2.0, git 1234abc-dirty, torch 2.13.0"),
    ]
    assert 'href="#word-mode"' in report
    assert "Step 0" in text
    assert "Step 60" in text
    assert "Step 20" not in text.split("Over time")[0]
    assert "step_20" in text
    assert "1.9 MiB" in text
    assert "step_61" not in text
    # 60 steps of 2.0, 2.6 and 0.5 s; the total is left out.
    assert "3 min, 51%" in text
    assert "2 min, 39%" in text
    assert "30.0 s, 10%" in text


def test_before_and_after_stand_above_one_another(run: Path, report: str) -> None:
    page = Page(report)
    grids = [Image.open(run / "samples" / f"step_{step:06d}.png") for step in (0, 60)]
    for number in range(8):
        for step, grid in zip((0, 60), grids, strict=True):
            reference = page.pictures(f'"w{number}", Step {step}: 0.{step}')[0]
            picture = Image.open(io.BytesIO(base64.b64decode(reference.split(",")[1])))
            left = 8 + number * (128 + 8)
            expected = grid.crop((left, 8, left + 128, 8 + 64))
            assert np.array_equal(np.asarray(picture), np.asarray(expected))


def test_the_training_reward_is_smoothed_and_constants_are_told(report: str) -> None:
    data = chart_data(report, "Mean reward")
    assert [(line["name"], line["faint"]) for line in data["series"]] == [
        ("training, each step", True),
        ("training", False),
        ("held-out", False),
    ]
    assert data["tables"][2][0] == [0, 20, 40, 60]
    text = visible_text(report)
    assert "the numbers of training are those of reward/ocr, too" in text
    assert "Effective sample size: 1, at all 60 steps." in text
    assert "Learning rate: 0.0003, at all 60 steps." in text


def test_equal_numbers_are_one_line_or_one_chart(tmp_path: Path) -> None:
    values = {"reward/mean": 1, "reward/a": 1, "reward/b": 2, "reward/c": 2, "reward/d": 3}
    values |= {
        f"rollout_corr/{name}": value for name, value in (("chi2_token", 2), ("chi2_seq", 2))
    }
    rows = [
        {name: step**power for name, power in values.items()} | {"step": step} for step in (1, 2)
    ]
    page = write_report(write_rows(tmp_path, rows)).read_text()
    assert chart_data(page, "reward/b = reward/c")["tables"] == [[[1, 2], [1, 4]]]
    assert chart_data(page, "reward/d")["tables"] == [[[1, 2], [1, 8]]]
    assert "the numbers of training are those of reward/a, too" in page
    (line,) = chart_data(page, "Chi-squared divergence")["series"]
    assert line["name"] == "chi2_token = chi2_seq"


def test_rejected_samples_are_one_chart(report: str) -> None:
    """Each second one is not finite, which no chart can draw."""
    data = chart_data(report, "Largest rejected difference")
    assert [line["name"] for line in data["series"]] == ["seq_mean_k1"]
    sizes = [pytest.approx(3e-4 + 1e-5 * step) for step in range(2, 61, 2)]
    assert data["tables"] == [[list(range(2, 61, 2)), sizes]]


def strip_of(page: Path) -> str:
    return "<div>" + page.read_text().split('<div class="strip">')[1].split("</section>")[0]


def test_a_strip_shows_four_prompts_over_time(tmp_path: Path) -> None:
    """Shows at most 12 steps of evaluations and of draws between them, as small pictures."""
    run = make_run(tmp_path / "run")
    shades = [np.full((n, 300, 300, 3), 90, np.uint8) for n in (4, 8)]
    for step in range(20):
        images, name = shades[step % 2], ("drawn", "step")[step % 2]
        captions = [f'"w{i}" 0.{step:02}' for i in range(len(images))]
        save_grid(run / "samples" / f"{name}_{step:06d}.png", images, captions)
    text = strip_of(write_report(run))
    strip = Page(text)
    assert len(strip.references) == 4 * 12
    png = base64.b64decode(strip.references[13].partition(",")[2])
    assert Image.open(io.BytesIO(png)).size == (128, 128)
    shown = re.findall(r"Step (\d+): 0\.(\d+)", visible_text(text))
    assert len(shown) == 48
    assert len(set(shown)) == 12
    steps = [int(step) for step, _ in shown[:12]]
    assert steps == sorted(steps)
    assert (steps[0], steps[-1]) == (0, 60)
    assert {step % 2 for step in steps} == {0, 1}
    other = np.zeros((4, 8, 8, 3), np.uint8)
    save_grid(run / "samples" / "drawn_000060.png", other, ["another 0.1"] * 4)
    assert '<div class="strip">' in write_report(run).read_text()  # the evaluation stands for it
    (run / "samples" / "step_000060.png").unlink()
    assert '<div class="strip">' not in write_report(run).read_text()


def test_texts_over_time_are_a_table(tmp_path: Path) -> None:
    write_rows(tmp_path, [{"step": 3, "reward/mean": 0.5}])
    for step in range(3):
        rows = [
            {"prompt": f"p{i}", "target": None, "completion": f"c{i}{step}", "score": 0.5}
            for i in range(4 if step == 1 else 9)
        ]
        write_rows(
            tmp_path / "samples", rows, f"{'drawn' if step == 1 else 'step'}_00000{step}.jsonl"
        )
    assert re.findall(r"c\d\d(?=0\.50)", visible_text(strip_of(write_report(tmp_path)))) == [
        f"c{i}{step}" for i in range(4) for step in range(3)
    ]


def test_report_is_deterministic(run: Path, report: str) -> None:
    assert write_report(run).read_text() == report
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
    assert [name for name in page.ids if not name.startswith("word-")] == SECTIONS
    assert not page.references


def test_stopped_run_says_how_far_it_came(tmp_path: Path) -> None:
    write_rows(tmp_path, [{"step": 3, "reward/mean": 0.5}, {"step": 4, "reward/mean": 0.6}])
    (tmp_path / "config.yaml").write_text("trainer:\n  total_training_steps: 9\n")
    text = visible_text(write_report(tmp_path).read_text())
    assert "Not evaluated yet; training reward 0.5000 \u2192 0.6000 (+0.1000)" in text
    assert "Training steps: 4 of 9" in text


def test_folder_without_metrics_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"is not the folder of a run, or .*: it has no metrics\.jsonl"
    ):
        write_report(tmp_path)
