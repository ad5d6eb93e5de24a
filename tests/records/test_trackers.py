"""Which loggers are refused, and what trackers keep on this machine."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sqlite3
import sys
from functools import partialmethod
from pathlib import Path

import pytest
from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker
from PIL import Image
from support.launching import ROOT, ran

from flowgrpo_rc.records.trackers import Trackers, accelerate_loggers, validate_loggers


def test_which_loggers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    validate_loggers(["console", "wandb", "tensorboard"])
    with pytest.raises(ValueError, match="'wandbb': allowed are console, wandb, tensorboard, tra"):
        validate_loggers(["console", "wandbb"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    validate_loggers(["console"])
    with pytest.raises(ValueError, match=r"needs the package tensorboard.*pip install tensorboard"):
        validate_loggers(["tensorboard"])
    assert accelerate_loggers(["console", "wandb", "wandb"]) == ["wandb"]


class Recorder(GeneralTracker):
    """Writes down what it is asked for, and raises at one thing."""

    name, requires_logging_directory, raises_at = "recorder", False, ""

    def __init__(self, project_name: str, **options: object) -> None:
        super().__init__()
        self.asked: list[str] = []
        made.append(self)

    def _note(self, name: str, *arguments: object, **options: object) -> None:
        self.asked.append(name)
        if name == self.raises_at:
            raise SystemExit("no: api_key=topsecret")

    start = partialmethod(_note, "start")
    log = partialmethod(_note, "log")
    log_images = partialmethod(_note, "image")
    store_init_configuration = partialmethod(_note, "settings")
    alert = partialmethod(_note, "alert")
    finish = partialmethod(_note, "finish")

    @property
    def tracker(self) -> Recorder:
        return self


class Raises(Recorder):
    """Takes the place of tensorboard."""


made: list[Recorder] = []


@pytest.mark.parametrize("where", ["start", "log", "image", "finish"])
def test_a_tracker_that_raises_is_off_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    made.clear()
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(Raises, "raises_at", where)
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "tensorboard", Raises)
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "wandb", Recorder)
    trackers = Trackers(
        Accelerator(cpu=True, log_with=["tensorboard", "wandb"], project_dir=tmp_path),
        project_name="project",
        experiment_name="experiment",
        run_dir=tmp_path,
        config={},
    )
    trackers.log(0, {"reward": 1.0})
    trackers.log_image(0, "val/samples", Image.new("RGB", (8, 8)))
    trackers.alert(0, "a warning")
    trackers.log(1, {"reward": 1.0})
    trackers.finish()
    asked = ["start", "log", "image", "log", "finish"]
    assert made[0].asked == asked[: asked.index(where) + 1]
    assert made[1].asked == ["start", "log", "image", "alert", "log", "finish"]
    (record,) = caplog.records
    assert record.getMessage() == (
        "the tracker tensorboard has failed and is off for the rest of this command; "
        "metrics.jsonl has all numbers: SystemExit: no: api_key=***"
    )


# Two commands on one run: steps 0 and 1, and after a resume step 2.
TWO_COMMANDS = """
import math, sys
from pathlib import Path
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from PIL import Image
from flowgrpo_rc.records.trackers import Trackers, accelerate_loggers

loggers, run_dir = accelerate_loggers(sys.argv[1].split("+")), Path("run")
run_dir.mkdir()
terms = {"mine": {"weight": 2.0, "note": "topsecret"}, "jpeg": None}
config = {"model": {"path": "tiny_model", "api_key": "topsecret"}, "reward": {"terms": terms}}
config["data"] = {"files": ["a", "b"], "n": None}
for steps in ([0, 1], [2]):
    trackers = Trackers(
        Accelerator(cpu=True, log_with=loggers, project_dir=run_dir),
        project_name="project",
        experiment_name="experiment",
        run_dir=run_dir,
        config=config,
        first_step=steps[0],
    )
    for step in steps:
        mismatch = {"rollout_corr/logprob_abs_diff/ts_1000": step / 4}
        trackers.log(step, mismatch | {"actor/pg_loss": math.nan})
        trackers.log_image(step, "val/samples", Image.new("RGB", (16, 8), "red"))
    trackers.alert(steps[0], "kl is outside its bounds")
    trackers.finish()
    AcceleratorState._reset_state(reset_partial_state=True)
"""
MISMATCH = "rollout_corr/logprob_abs_diff/ts_1000"


def two_commands(loggers: str, folder: Path) -> Path:
    """Runs them with everything that a tracker keeps below `folder`, which is returned.

    It holds what was measured, and no secret.
    """
    for logger in loggers.split("+"):
        pytest.importorskip(logger)
    places = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        "TRACKIO_DIR": str(folder / "trackio"),
        "MLFLOW_TRACKING_URI": f"file://{folder}/mlruns",
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "SWANLAB_MODE": "offline",
        "WANDB_API_KEY": "topsecret" * 5,
        "WANDB_MODE": "offline",
    }
    words = [sys.executable, "-c", TWO_COMMANDS, loggers, "api_key=topsecret"]
    done = ran(*words, cwd=folder, env=os.environ | places)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "has failed and is off" not in done.stderr
    files = [path for path in folder.rglob("*") if path.is_file()]
    content = b"".join(str(path).encode() + path.read_bytes() for path in files)
    assert b"logprob_abs_diff" in content
    assert b"topsecret" not in content
    assert b"jpeg" not in content, "a reward that was dropped"
    return folder


@pytest.mark.parametrize("logger", ["swanlab", "mlflow", "aim"])
def test_a_tracker_takes_everything_and_no_secret_reaches_it(logger: str, tmp_path: Path) -> None:
    two_commands(logger, tmp_path)


def test_a_resumed_run_goes_on_in_the_same_run_of_its_trackers(tmp_path: Path) -> None:
    """The trackers are three at once, since each command takes seconds to import them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = two_commands("wandb+tensorboard+trackio", tmp_path) / "run"
    identity = (run / "wandb_id").read_text()
    assert re.fullmatch(r"[0-9a-f]{16}", identity)
    records = list(run.rglob("*.wandb"))
    assert [path.name for path in records] == [f"run-{identity}.wandb"] * 2
    for record in records:
        content = record.read_bytes()
        words = (b"logprob_abs_diff", b"tiny_model", b"mine", b"experiment", b"kl is outside its")
        assert all(word in content for word in words)
    assert len(list((run / "wandb").rglob("*.png"))) == 3

    (folder,) = {path.parent for path in run.rglob("*tfevents*")}
    events = EventAccumulator(str(folder)).Reload()
    logged = [(event.step, event.value) for event in events.Scalars(MISMATCH)]
    assert logged == [(step, step / 4) for step in (0, 1, 2)]
    assert [(image.width, image.height) for image in events.Images("val/samples")] == [(16, 8)] * 3

    with sqlite3.connect(tmp_path / "trackio" / "project.db") as database:
        rows = database.execute("select run_name, step, metrics from metrics").fetchall()
        ((settings,),) = database.execute("select config from configs").fetchall()
    database.close()
    numbers = [(name, step, json.loads(metrics)) for name, step, metrics in rows]
    logged = [(name, step, row[MISMATCH]) for name, step, row in numbers if MISMATCH in row]
    assert logged == [("experiment", step, step / 4) for step in (0, 1, 2)]
    assert sum("val/samples" in row for _, _, row in numbers) == 3
    assert json.loads(settings)["model.path"] == "tiny_model"
