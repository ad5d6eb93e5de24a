"""Runs compared on one page: numbers, settings, curves in the same axes, samples."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.report_pages import Page, chart_data, make_run, visible_text, write_rows

from flowgrpo_rc.cli import main
from flowgrpo_rc.report.compare import write_comparison

SIZE = {"rollout": {"pipeline": {"height": 64}, "val_kwargs": {"height": None}}}
SECTIONS = ["numbers", "samples", "settings", "reward", "correction", "update", "health", "words"]


def small_run(folder: Path, rewards: list[float], settings: dict[str, object]) -> Path:
    rows: list[dict[str, float]] = [
        {"step": step, "val/reward": reward} for step, reward in enumerate(rewards)
    ]
    rows[-1] |= {"rollout_corr/logprob_abs_diff_mean": 2e-4, "perf/samples_per_second": 4.0}
    write_rows(folder, rows)
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    return folder


def cells(page: str, section: str) -> list[list[str]]:
    """Returns the rows of a section's table."""
    body = page.split(f'<section id="{section}">')[1].split("</section>")[0]
    body = body.replace("<wbr>", "")
    return [re.findall(r"<t[hd][^>]*>([^<]*)<", row) for row in body.split("<tr>")[1:]]


def test_numbers_settings_and_curves_of_two_runs(tmp_path: Path) -> None:
    base = {"actor": {"lr": 0.1}, "data": {"val_files": "v.txt"}, "reward": {"api_key": "hunter2"}}
    base |= {"trainer": {"experiment_name": "a", "output_dir": "x"}}
    other = {"actor": {"lr": 0.2}, "rollout": {"dtype": "fp32"}, "reward": {"api_key": "hunter3"}}
    other |= {"trainer": {"experiment_name": "b", "output_dir": "y"}}
    one = small_run(tmp_path / "one", [0.25, 0.5], base)
    two = small_run(tmp_path / "two", [0.25, 0.75], base | other)
    page = write_comparison([one, two], tmp_path / "out" / "page.html").read_text()
    assert [name for name in Page(page).ids if not name.startswith("word-")] == SECTIONS
    rows = [["", "a", "b"], ["actor.lr", "0.1", "0.2"], ["rollout.dtype", "\u2014", "fp32"]]
    assert cells(page, "settings") == rows
    numbers = {row[0]: row[1:] for row in cells(page, "numbers")}
    assert numbers["held-out reward"] == ["0.2500 \u2192 0.5000", "0.2500 \u2192 0.7500"]
    assert numbers["mismatch before the first update, over all steps"] == ["0.0002", "0.0002"]
    assert "training reward, last step" not in numbers
    data = chart_data(page, "Held-out reward")
    assert [line["name"] for line in data["series"]] == ["a", "b"]
    assert data["tables"] == [[[0, 1], [0.25, 0.5]], [[0, 1], [0.25, 0.75]]]
    assert "hunter" not in page
    assert "not evaluated alike" not in page


def test_a_run_without_a_metric_leaves_the_others_colour_alone(tmp_path: Path) -> None:
    one = small_run(tmp_path / "one", [0.25, 0.5], {})
    two = small_run(tmp_path / "two", [0.25, 0.5], {})
    write_rows(one, [{"step": 0, "val/reward": 0.3}])
    name = "rollout_corr/logprob_abs_diff_mean"
    write_rows(two, [{"step": step, name: step * 1e-4} for step in (1, 2)])
    page = write_comparison([one, two], tmp_path / "page.html").read_text()
    (line,) = chart_data(page, "Mismatch before the first update")["series"]
    assert line == {"name": "two", "color": 1, "faint": False}


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ([{"data": {"val_files": n}} for n in "ab"], "data.val_files"),
        (
            [{"reward": {"terms": {"ocr": {"weight": n}}}} for n in (1, 2)],
            "reward.terms.ocr.weight",
        ),
        ([{"rollout": {"val_kwargs": {"n": n}}} for n in (1, 2)], "rollout.val_kwargs.n"),
        # Without a size of its own an evaluation takes that of the training.
        ([SIZE, {"rollout": {"val_kwargs": {"height": 32}}}], "rollout.val_kwargs.height"),
        ([SIZE, {"rollout": {"val_kwargs": {"height": 64}}}], ""),
    ],
)
def test_runs_that_were_scored_differently_say_so(
    tmp_path: Path, settings: list[dict[str, Any]], key: str
) -> None:
    runs = [small_run(tmp_path / str(n), [0.1, 0.2], tree) for n, tree in enumerate(settings)]
    text = visible_text(write_comparison(runs, tmp_path / "page.html").read_text())
    assert (f"The runs were not evaluated alike ({key})" in text) is bool(key)
    assert ("not evaluated alike" in text) is bool(key)


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    settings = {"trainer": {"experiment_name": "tiny"}}
    runs = [small_run(tmp_path / name / "run", [0.1, 0.2], settings) for name in ("a", "b")]
    page = write_comparison(runs, tmp_path / "p.html").read_text()
    assert cells(page, "numbers")[0] == ["", "a/run", "b/run"]


def test_samples_stand_side_by_side_and_the_page_is_deterministic(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name) for name in ("one", "two")]
    first = write_comparison(runs, tmp_path / "page.html").read_bytes()
    assert write_comparison(runs, tmp_path / "page.html").read_bytes() == first
    references = Page(first.decode()).references
    # The runs are alike: eight samples of each, and of the model that both began with.
    assert references[1::3] == references[2::3] != references[::3]
    assert len(references) == 3 * 8
    labels = [label for label, _ in Page(first.decode()).images[:3]]
    assert labels == [f'"w0", {name}' for name in ("base model: 0.0", "one: 0.60", "two: 0.60")]
    assert "hunter" not in first.decode()
    assert "<script>alert" not in first.decode()


def test_pictures_before_training_are_shown_once_for_each_model(tmp_path: Path) -> None:
    one, two = (make_run(tmp_path / name) for name in ("one", "two"))
    (one / "config.yaml").unlink()
    (two / "config.yaml").write_text("model: {lora_path: first/lora}\n")
    (two / "samples" / "step_000000.png").write_bytes(
        (one / "samples" / "step_000020.png").read_bytes()
    )
    page = write_comparison([one, two], tmp_path / "page.html").read_text()
    labels = [label.partition(", ")[2] for label, _ in Page(page).images[:3]]
    assert labels == ["one, base model: 0.0", "two, before training: 0.20", "one: 0.60"]


def test_curves_that_are_equal_in_all_runs_share_a_chart(tmp_path: Path) -> None:
    runs = []
    for folder, last in (("one", 0.75), ("two", 0.5)):
        ends = {"val/reward": 1.0, "val/ocr": 1.0, "val/ocr/exact": last, "reward/mean": 0.0}
        rows = [dict.fromkeys(ends, 0.0) | {"step": 1}, ends | {"step": 2}]
        runs.append(write_rows(tmp_path / folder, rows))
    page = write_comparison(runs, tmp_path / "page.html").read_text()
    section = page.split('<section id="reward">')[1].split("</section>")[0]
    titles = ["Training reward", "Held-out reward = val/ocr", "val/ocr/exact"]
    assert sorted(titles, key=section.index) == [titles[1], titles[0], titles[2]]
    names = [[line["name"] for line in chart_data(page, title)["series"]] for title in titles[1:]]
    assert names == [["one = two"], ["one", "two"]]


def test_what_cannot_be_compared_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = small_run(tmp_path / "run", [0.1, 0.2], {})
    out = ["--out", str(tmp_path / "page.html")]
    for folders, message in (
        ([run], "give two to 4 folders of runs, not 1"),
        ([run, tmp_path / "run" / ".." / "run"], "names a run twice"),
        ([run, tmp_path], "is not the folder of a run"),
    ):
        assert main(["compare", *map(str, folders), *out]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()
    other = small_run(tmp_path / "other", [0.1, 0.3], {})
    assert main(["compare", str(run), str(other), *out]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "page.html")
