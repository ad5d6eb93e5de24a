"""metrics.jsonl, the trackers behind accelerate, and the console."""

from __future__ import annotations

import importlib.util
import io
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flowgrpo_rc.files import redact
from flowgrpo_rc.records.console import Console
from flowgrpo_rc.records.metrics_file import MetricsFile
from flowgrpo_rc.records.trackers import accelerate_loggers, validate_loggers

RUN_TRACKERS = """
import sys
from pathlib import Path
from accelerate import Accelerator
from PIL import Image
from flowgrpo_rc.records.trackers import Trackers, accelerate_loggers
logger, run_dir = sys.argv[1], Path(sys.argv[2])
accelerator = Accelerator(cpu=True, log_with=accelerate_loggers(["console", logger]), project_dir=run_dir)
config = {"model": {"path": "tiny_model"}, "reward": {"api_key": "hunter2"}}
trackers = Trackers(accelerator, project_name="proj", experiment_name="exp", run_dir=run_dir, config=config)
trackers.log(0, {"val/reward": 0.25})
trackers.log_image(0, "samples", Image.new("RGB", (16, 8), "red"))
trackers.log_histograms(1, {"log_ratio": {-31: 4, 0: 1, 41: 3}})
trackers.log(1, {"reward/mean": 0.5, "actor/pg_loss": float("nan")})
trackers.alert(1, "kl is outside its bounds")
trackers.finish()
"""


def test_rows_are_sorted_json_lines(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    assert file.rows() == []
    file.append(0, {"val/reward": 0.25})
    file.append(1, {"reward/mean": 0.1 + 0.2, "actor/lr": 1e-7, "count": 3})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert text == (
        '{"step": 0, "val/reward": 0.25}\n'
        '{"actor/lr": 1e-07, "count": 3, "reward/mean": 0.30000000000000004, "step": 1}\n'
    )
    assert file.rows() == [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_json_has_no_word_for_are_null(tmp_path: Path, value: float) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.append(1, {"actor/pg_loss": value})
    assert file.path.read_text() == '{"actor/pg_loss": null, "step": 1}\n'


@pytest.mark.parametrize(
    "torn", [b'{"step": 3, "rew', b"{", b'{"step": 3}', b'{"step": 3, "a": "\xc3', b"\x00" * 9]
)
def test_torn_last_line_is_dropped(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    complete = b'{"step": 1}\n{"step": 2}\n'
    path.write_bytes(complete + torn)
    file = MetricsFile(path)
    assert [row["step"] for row in file.rows()] == [1, 2]
    file.append(3, {"a": 1.0})
    assert path.read_bytes() == complete + b'{"a": 1.0, "step": 3}\n'
    path.write_bytes(complete + torn)
    file.truncate_after(9)
    assert path.read_bytes() == complete


def test_every_cut_of_the_file_can_be_resumed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    for step in range(3):
        file.append(step, {"a": step / 3})
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        file.truncate_after(1)
        steps = [row["step"] for row in file.rows()]
        for step in range(len(steps), 3):
            file.append(step, {"a": step / 3})
        assert path.read_bytes() == whole


def test_truncate_drops_later_steps_and_leaves_no_other_file(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.truncate_after(3)
    assert list(tmp_path.iterdir()) == []
    for step in (0, 1, 1, 2, 3):
        file.append(step, {"message": f"s{step}"})
    file.truncate_after(1)
    assert [row["message"] for row in file.rows()] == ["s0", "s1", "s1"]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_damage_before_the_last_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step"\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2"):
        MetricsFile(path).rows()
    assert len(path.read_text().splitlines()) == 3


def test_full_disk_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"cannot write the metrics.*No space left.*metrics\.jsonl"):
        MetricsFile(path).append(1, {"a": 1.0})


def test_missing_folder_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"cannot write the metrics.*gone/metrics\.jsonl"):
        MetricsFile(tmp_path / "gone" / "metrics.jsonl").append(1, {"a": 1.0})


def test_unknown_logger_is_refused_with_what_is_allowed() -> None:
    validate_loggers(["console", "wandb", "tensorboard"])
    with pytest.raises(
        ValueError, match="'wandbb' is unknown; allowed are console, wandb, tensorboard"
    ):
        validate_loggers(["console", "wandbb"])


def test_logger_without_its_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    validate_loggers(["console"])
    with pytest.raises(ValueError, match=r"needs the package tensorboard.*pip install tensorboard"):
        validate_loggers(["tensorboard"])


def test_console_is_not_accelerates() -> None:
    assert accelerate_loggers(["console", "wandb", "wandb"]) == ["wandb"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"api_key": "x", "HF_TOKEN": "x", "password": "x", "a": [{"client_secret": "x"}]}, None),
        ({"url": "https://me:x1y2@host/score"}, {"url": "https://***@host/score"}),
        (
            ["reward.remote.api_key=x y", "Authorization: Bearer x"],
            ["reward.remote.api_key=*** y", "Authorization: Bearer ***"],
        ),
        ("hf_abcdefghijklmnopqrst", "***"),
    ],
)
def test_secrets_are_removed(value: Any, expected: Any) -> None:
    if expected is None:
        expected = json.loads(json.dumps(value).replace('"x"', '"***"'))
    assert redact(value) == expected


def test_what_is_no_secret_stays() -> None:
    config = {
        "rollout_is": "token",
        "rollout_token_veto_threshold": 1e-4,
        "rollout_rs": "token_k1",
        "max_tokens": 3,
        "token": None,
        "url": "http://host:8000/score",
        "prompt": 'a sign that says "K3Y"',
        "keys": ["a", "b"],
    }
    assert redact(config) == config


def run_trackers(logger: str, run_dir: Path) -> list[Path]:
    environment = os.environ | {
        "WANDB_MODE": "offline",
        "WANDB_API_KEY": "hunter4" * 6,
        "WANDB_SILENT": "true",
    }
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    command = [sys.executable, "-c", RUN_TRACKERS, logger, str(run_dir), "reward.api_key=hunter3"]
    subprocess.run(
        command, env=environment, check=True, capture_output=True, timeout=600, cwd=run_dir
    )
    return [path for path in run_dir.rglob("*") if path.is_file()]


def test_wandb_offline_records_numbers_and_images_and_no_secret(tmp_path: Path) -> None:
    files = run_trackers("wandb", tmp_path)
    (record,) = [path for path in files if path.suffix == ".wandb"]
    content = record.read_bytes()
    for expected in (
        b"val/reward",
        b"reward/mean",
        b"tiny_model",
        b"exp",
        b"kl is outside its bounds",
        b"log_ratio",
    ):
        assert expected in content
    assert any(path.suffix == ".png" for path in files)
    assert not any(b"hunter" in path.read_bytes() for path in files)
    identity = (tmp_path / "wandb_id").read_text()
    assert re.fullmatch(r"[0-9a-f]{16}", identity)
    assert record.name == f"run-{identity}.wandb"


def test_tensorboard_records_numbers_and_images(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (events,) = [path for path in run_trackers("tensorboard", tmp_path) if "tfevents" in path.name]
    found = EventAccumulator(str(events.parent)).Reload()
    assert [(event.step, event.value) for event in found.Scalars("val/reward")] == [(0, 0.25)]
    assert [(event.step, event.value) for event in found.Scalars("reward/mean")] == [(1, 0.5)]
    (event,) = found.Histograms("histograms/log_ratio")
    heights = dict(
        zip(event.histogram_value.bucket_limit, event.histogram_value.bucket, strict=True)
    )
    # The upper edges of the bins -31, 0 and 41: ten bins for each power of ten from 1e-9.
    assert {f"{limit:.4g}": n for limit, n in heights.items() if n} == {
        "-1e-06": 4,
        "1e-09": 1,
        "1.259e-05": 3,
    }
    assert (event.step, event.histogram_value.num) == (1, 8)
    (image,) = found.Images("samples")
    assert (image.width, image.height) == (16, 8)


def console_output(*, is_main: bool = True, show_steps: bool = True) -> str:
    stream = io.StringIO()
    with Console(total_steps=2, is_main=is_main, show_steps=show_steps, stream=stream) as console:
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


def test_console_without_steps_keeps_warnings_and_table() -> None:
    text = console_output(show_steps=False)
    assert "step" not in text
    assert "warning: kl" in text
    assert "+0.5000" in text


def test_console_of_other_processes_is_silent() -> None:
    assert console_output(is_main=False) == ""


def test_console_shows_a_live_view_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console_output())
    assert "step 1/2" not in text.replace("\n", " ").replace("step 1/2 \u2501", "")
    assert "2/2" in text
    assert "reward 0.500  val 0.750  41.3 samples/s" in text
    assert text.count("warning: kl is outside [-0.1, 0.1]") == 1
