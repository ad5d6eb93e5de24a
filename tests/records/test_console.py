"""What the console prints, with and without a terminal."""

from __future__ import annotations

import io
import re

import pytest

from flowgrpo_rc.records.console import Console
from flowgrpo_rc.records.speed import SPEED


def console_output(*, quiet: bool = False, show_steps: bool = True) -> str:
    stream = io.StringIO()
    with Console(total_steps=2, quiet=quiet, show_steps=show_steps, stream=stream) as console:
        console.message("run [red]dir")
        console.step(0, {"val/reward": 0.25})
        console.warning("kl is outside [-0.1, 0.1]")
        console.step(1, {"reward/mean": 0.5, "perf/samples_per_second": 41.26})
        console.warning("kl is outside [-0.1, 0.1]")
        console.step(2, {"reward/mean": 0.5, "val/reward": 0.75})
    console.final_table(
        {"val/reward": 0.25, "val/ocr/exact": 0.0}, {"val/reward": 0.75, "val/ocr/exact": 0.5}
    )
    return stream.getvalue()


def test_console_prints_one_line_per_step_without_a_terminal() -> None:
    lines = console_output().splitlines()
    assert lines[:3] == [
        "run [red]dir",
        "step 0/2  val 0.250",
        "warning: kl is outside [-0.1, 0.1]",
    ]
    assert re.fullmatch(r"step 1/2  reward 0\.500  41\.3 samples/s  eta \d+s", lines[3])
    assert lines[4] == "step 2/2  reward 0.500  val 0.750"
    rows = [re.findall(r"[\w/.+-]+", line) for line in lines[5:]]
    assert ["reward", "0.2500", "0.7500", "+0.5000"] in rows
    assert ["ocr/exact", "0.0000", "0.5000", "+0.5000"] in rows


@pytest.mark.parametrize(
    ("further", "rows"),
    [
        ({"ocr": 0.5}, ["reward (ocr)"]),
        ({"ocr": 0.25}, ["reward", "ocr"]),
        ({"ocr": 0.5, "ocr/exact": 0.5}, ["reward (ocr)", "ocr/exact"]),
        ({"ocr": 0.5, "clip[s]": 0.5}, ["reward", "ocr", "clip[s]"]),
        ({"failed_fraction": 0.25, "ocr": 0.5}, ["reward (ocr)", "failed_fraction"]),
    ],
)
def test_the_table_has_what_says_something(further: dict[str, float], rows: list[str]) -> None:
    metrics = {"reward": 0.5, "std": 0.1, "failed_fraction": 0.0} | further
    after = {f"val/{name}": value for name, value in metrics.items()}
    stream = io.StringIO()
    Console(total_steps=2, stream=stream).final_table(after, after)
    shown = stream.getvalue().splitlines()[4:-1]
    assert [line.split("\u2502")[1].strip() for line in shown] == rows


def test_console_without_steps_keeps_warnings_and_table() -> None:
    text = console_output(show_steps=False)
    assert "step" not in text
    assert "warning: kl" in text
    assert "+0.5000" in text
    assert console_output(quiet=True) == ""  # of other processes


def test_console_shows_a_live_view_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console_output())
    assert "step 1/2" not in text.replace("\n", " ").replace("step 1/2 \u2501", "")
    assert "2/2" in text
    assert "reward 0.500  val 0.750  41.3 samples/s" in text
    assert text.count("warning: kl is outside [-0.1, 0.1]") == 1


def test_a_narrow_terminal_shows_the_step_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "60")
    stream = io.StringIO()
    with Console(total_steps=20000, stream=stream) as console:
        console.step(12346, {"reward/mean": 0.5, "val/reward": 0.75, SPEED: 41.26})
    assert "step 12346/20000 " in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
