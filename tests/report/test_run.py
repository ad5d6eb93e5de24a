"""The report, its sample grids and the correction figure, on fabricated runs."""

from __future__ import annotations

import base64
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.report_pages import Page, make_run

from flowgrpo_rc.records.samples import image_grid
from flowgrpo_rc.report.charts import Series, line_chart
from flowgrpo_rc.report.figure import plot_rollout_correction
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


@pytest.mark.parametrize("prefix", ["rollout_corr/", "actor/rollout_corr/"])
def test_difference_by_timestep_is_the_mean_over_steps(tmp_path: Path, prefix: str) -> None:
    rows = [
        {"step": 1, f"{prefix}logprob_abs_diff/ts_750": 1e-5},
        {"step": 2, f"{prefix}logprob_abs_diff/ts_750": 3e-5},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = "".join(Page(write_report(tmp_path).read_text()).text)
    assert "mean over steps: 2e-05 at 750" in text
    assert "largest step: 3e-05 at 750" in text


@pytest.mark.parametrize("over", [0.5, None])
def test_the_clip_band_is_drawn_where_the_floor_is(tmp_path: Path, over: float | None) -> None:
    """Half the band at the median: 2e-4, inside the range of the percentiles."""
    row = {
        f"rollout_corr/logprob_abs_diff_{part}": value
        for part, value in (("p50", 1e-4), ("p99", 4e-4))
    }
    row |= {
        "rollout_corr/logprob_abs_diff/ts_750": 5e-5,
        "rollout_corr/logprob_abs_diff/ts_500": 5e-4,
    }
    row |= {"rollout_corr/policy_drift_abs_mean": 3e-5}
    row |= {} if over is None else {"rollout_corr/mismatch_over_clip": over}
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, **row}) + "\n")
    text = write_report(tmp_path).read_text()
    assert (
        text.count("dashed: the clip band, 0.0002")
        == text.count("threshold 0.0002")
        == (2 if over else 0)
    )
    assert "policy_drift_abs_mean: 3e-05 at 1" in text


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([0.41, 0.79], ["0.4", "0.5", "0.6", "0.7", "0.8"]),
        ([1.00001, 1.00004], ["1.00001", "1.00002", "1.00003", "1.00004"]),
        ([-2e-5, 1e-5], ["-2e-5", "-1e-5", "0", "1e-5"]),
        ([3.0, 3.0], ["2.6", "2.8", "3.0", "3.2", "3.4"]),
    ],
)
def test_ticks_are_round_and_cover_the_data(values: list[float], labels: list[str]) -> None:
    chart = line_chart("c", [Series(name="s", points=list(enumerate(values)))])
    assert re.findall(r'class="y"[^>]*>([^<]+)<', chart) == labels


def test_chart_line_runs_from_bottom_left_to_top_right() -> None:
    chart = line_chart("c", [Series(name="s", points=[(0, 0.0), (4, None), (8, 1.0), (10, 1.0)])])
    assert 'class="line" d="M0.0 300.0M800.0 0.0L1000.0 0.0"' in chart


def test_long_runs_keep_their_spikes_in_a_small_chart() -> None:
    values = np.ones(20_000)
    values[12_345] = 9.0
    chart = line_chart("c", [Series(name="s", points=list(enumerate(values.tolist())))])
    assert len(chart) < 20_000
    # 1000 * 12345 / 19999, and 9 on an axis from 0 to 10 that is 300 high.
    assert "L617.3 30.0L" in chart


@pytest.mark.parametrize("values", [[1e-6, 1e-2], [2e-5, 9e-5], [1e-4, 1e-4], [1e-12, 1.0]])
def test_log_axis_covers_the_data(values: list[float]) -> None:
    chart = line_chart("c", [Series(name="s", points=list(enumerate(values)))], log_y=True)
    ticks = [float(label) for label in re.findall(r'class="y"[^>]*>([^<]+)<', chart)]
    assert 2 <= len(ticks) <= 8
    assert ticks[0] <= values[0] * 1.000001
    assert ticks[-1] >= values[1] * 0.999999 or len(ticks) > 5


def test_grid_enlarges_small_images_by_whole_pixels() -> None:
    image = np.zeros((1, 32, 32, 3), np.uint8)
    image[0, 0, 0] = (255, 0, 0)
    grid = np.asarray(image_grid(image, ["x"]))
    red = np.argwhere((grid == (255, 0, 0)).all(-1))
    assert len(red) == 16
    assert (red.max(0) - red.min(0) == 3).all()


def test_grid_reduces_large_images_and_counts_rows() -> None:
    grid = image_grid(
        np.zeros((5, 512, 1024, 3), np.uint8), ["a long caption " * 30] * 5, columns=2
    )
    black = (np.asarray(grid) == 0).all(-1)
    assert black.sum() == 5 * 128 * 256
    assert grid.width < 2 * 256 + 40


def test_grid_shows_captions() -> None:
    images = np.full((2, 64, 64, 3), 255, np.uint8)
    blank, written = (
        np.asarray(image_grid(images, captions)) for captions in (["", ""], ["", 'sign "AB1"'])
    )
    changed = np.argwhere((blank != written).any(-1))
    assert len(changed)
    assert changed[:, 1].min() > blank.shape[1] / 2
    assert changed[:, 0].min() > 128


@pytest.mark.parametrize(
    ("images", "captions", "message"),
    [
        (np.zeros((1, 8, 8, 3), np.float32), ["a"], "float32"),
        (np.zeros((8, 8, 3), np.uint8), ["a"], r"\(8, 8, 3\)"),
        (np.zeros((0, 8, 8, 3), np.uint8), [], "N > 0"),
        (np.zeros((2, 8, 8, 3), np.uint8), ["a"], "2 images but 1 captions"),
    ],
)
def test_grid_refuses_other_input(images: np.ndarray, captions: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        image_grid(images, captions)


def test_plot_of_rows_and_of_a_file_agree_in_either_mode(tmp_path: Path) -> None:
    names = (
        "rollout_is_mean",
        "rollout_is_eff_sample_size",
        "rollout_is_veto_fraction",
        "kl",
        "ppl_ratio",
        "chi2_token",
    )
    bypass, decoupled = (
        [{"step": step, **{prefix + name: 0.1 * step for name in names}} for step in range(3)]
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
