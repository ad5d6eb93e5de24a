"""Where numbers go: metrics.jsonl always, wandb and tensorboard through accelerate when asked for.

Nothing secret leaves the process: configurations pass through `redact`, and wandb's own collection of the command
line and the git remote is switched off.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from flowgrpo_rc.training.histograms import Counts, edges

if TYPE_CHECKING:
    from accelerate import Accelerator

LOGGERS = ("console", "wandb", "tensorboard")
REDACTED = "***"

_SECRET_NAME = r"(?:\w*(?:api|access|private)_?key|(?:\w+_)?(?:secret|password|passwd|credentials?)|authorization"
_SECRET_NAME += r"|(?:\w+_)?token)"
_SECRET_KEY = re.compile(_SECRET_NAME, re.IGNORECASE)
_SECRET_ASSIGNMENT = re.compile(rf"(?<!\w)({_SECRET_NAME}\s*[=:]\s*(?:Bearer\s+)?)(?!//)[^\s,;}}\]]+", re.IGNORECASE)
_SECRET_VALUE = re.compile(r"\b(?:hf_\w{16,}|sk-[\w-]{16,}|gh[pousr]_\w{16,})\b|(?<=://)[^/\s:@]+:[^/\s@]+(?=@)")


class MetricsFile:
    """Rows of names and numbers, one JSON object a line. It also serves health.jsonl, whose rows hold a message, and
    histograms.jsonl, whose rows hold counts by bin.

    Every row reaches the disk before `append` returns. A value that is not finite is written as null, since JSON has
    no other word for it. A line torn by a kill is dropped by whoever touches the file next.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, step: int, values: Mapping[str, float | str | Mapping[int, int] | None]) -> None:
        """Adds the row of `step`. Raises OSError naming the file where the disk refuses it."""
        row = {"step": step} | {name: _as_json(value) for name, value in values.items()}
        line = json.dumps(row, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"
        try:
            self._drop_torn_line()
            with self.path.open("ab") as file:
                file.write(line.encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise _unwritable(self.path, error) from error

    def rows(self) -> list[dict[str, Any]]:
        """All rows in file order; [] where there is no file. ValueError where a line before the last is damaged."""
        return [row for row, _ in self._lines()]

    def truncate_after(self, step: int) -> None:
        """Drops the rows of later steps and a torn last line; the file is replaced at once or not at all."""
        if not self.path.exists():
            return
        kept = b"".join(line + b"\n" for row, line in self._lines() if row["step"] <= step)
        try:
            write_atomic(self.path, kept)
        except OSError as error:
            raise _unwritable(self.path, error) from error

    def _lines(self) -> list[tuple[dict[str, Any], bytes]]:
        lines = self.path.read_bytes().split(b"\n") if self.path.exists() else [b""]
        # What follows the last newline is torn, or nothing.
        complete = [(number, line) for number, line in enumerate(lines[:-1], start=1) if line.strip()]
        parsed = []
        for number, line in complete:
            row = _parse(line)
            if row is not None:
                parsed.append((row, line))
            elif number != complete[-1][0]:
                raise ValueError(f"{self.path}, line {number}: not a JSON object with a 'step'; the file is damaged")
        return parsed

    def _drop_torn_line(self) -> None:
        if not self.path.is_file() or self.path.stat().st_size == 0:
            return
        with self.path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            if file.read(1) == b"\n":
                return
        os.truncate(self.path, self.path.read_bytes().rfind(b"\n") + 1)


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _as_json(value: float | str | Mapping[int, int] | None) -> float | str | Mapping[int, int] | None:
    if value is None or isinstance(value, str | int | Mapping):
        return value
    return float(value) if math.isfinite(value) else None


def _unwritable(path: Path, error: OSError) -> OSError:
    return OSError(error.errno, f"cannot write the metrics of this run ({error.strerror})", str(path))


def write_atomic(path: Path, content: bytes) -> None:
    """Replaces `path` by `content` through a temporary file beside it that is on the disk before the rename."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def redact(value: Any) -> Any:
    """`value` (a tree of mappings, lists and scalars) without passwords, keys and tokens."""
    if isinstance(value, Mapping):
        return {
            key: REDACTED if _SECRET_KEY.fullmatch(str(key)) and item not in (None, "") else redact(item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [redact(item) for item in value]
    if isinstance(value, str):
        return _SECRET_ASSIGNMENT.sub(rf"\1{REDACTED}", _SECRET_VALUE.sub(REDACTED, value))
    return value


def validate_loggers(loggers: Sequence[str]) -> None:
    """ValueError where `trainer.logger` names a logger that does not exist or whose package is missing."""
    for name in loggers:
        if name not in LOGGERS:
            raise ValueError(f"trainer.logger: {name!r} is unknown; allowed are {', '.join(LOGGERS)}")
        if name != "console" and importlib.util.find_spec(name) is None:
            raise ValueError(
                f"trainer.logger: {name!r} needs the package {name}, which is not installed: pip install {name}"
            )


def accelerate_loggers(loggers: Sequence[str]) -> list[str]:
    """What `Accelerator(log_with=..., project_dir=run_dir)` takes: the loggers other than the console."""
    return [name for name in dict.fromkeys(loggers) if name != "console"]


class Trackers:
    """The trackers of an Accelerator that was made with `log_with=accelerate_loggers(...)`, on its main process.

    A resumed run goes on in the same wandb run, whose id stands in the run's folder; tensorboard hides the events of
    steps that are done again (those from `first_step` on).
    """

    def __init__(
        self,
        accelerator: Accelerator,
        *,
        project_name: str,
        experiment_name: str,
        run_dir: Path,
        config: Mapping[str, Any],
        first_step: int = 0,
    ) -> None:
        self._accelerator = accelerator
        self._names = [str(name) for name in accelerator.log_with] if accelerator.is_main_process else []
        settings: dict[str, dict[str, Any]] = {}
        if "wandb" in self._names:
            settings["wandb"] = _wandb_settings(experiment_name, run_dir) | {"config": redact(config)}
        if "tensorboard" in self._names and first_step > 0:
            settings["tensorboard"] = {"purge_step": first_step}
        if self._names:
            accelerator.init_trackers(project_name, init_kwargs=settings)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._names:
            self._accelerator.log(dict(metrics), step=step)

    def log_image(self, step: int, name: str, image: Image.Image) -> None:
        if "wandb" in self._names:
            self._accelerator.get_tracker("wandb").log_images({name: [image]}, step=step)
        if "tensorboard" in self._names:
            batch = np.asarray(image.convert("RGB"))[None]
            self._accelerator.get_tracker("tensorboard").log_images({name: batch}, step=step, dataformats="NHWC")

    def log_histograms(self, step: int, found: Mapping[str, Counts]) -> None:
        """Histograms in the bins of `training.histograms`."""
        for name, counts in found.items():
            numbers = range(min(counts, default=0), max(counts, default=0) + 1)
            heights = [counts.get(number, 0) for number in numbers]
            if "wandb" in self._names:
                import wandb

                histogram = wandb.Histogram(np_histogram=(np.array(heights), np.array(edges(numbers))))
                self._accelerator.get_tracker("wandb", unwrap=True).log({f"histograms/{name}": histogram}, step=step)
            if "tensorboard" in self._names:
                limits = edges(numbers)
                centres = np.array([(a + b) / 2 for a, b in itertools.pairwise(limits)])
                self._accelerator.get_tracker("tensorboard", unwrap=True).add_histogram_raw(
                    f"histograms/{name}",
                    min=limits[0],
                    max=limits[-1],
                    num=sum(heights),
                    sum=float(centres @ heights),
                    sum_squares=float(centres**2 @ heights),
                    bucket_limits=limits[1:],
                    bucket_counts=heights,
                    global_step=step,
                )

    def alert(self, step: int, text: str) -> None:
        """Tell the people who watch the run, where a tracker can: wandb sends mails and messages."""
        if "wandb" in self._names:
            run = self._accelerator.get_tracker("wandb", unwrap=True)
            run.alert(title=f"step {step}: rollout correction", text=text, level="WARN", wait_duration=0)

    def finish(self) -> None:
        for name in self._names:
            self._accelerator.get_tracker(name).finish()


def _wandb_settings(experiment_name: str, run_dir: Path) -> dict[str, Any]:
    import wandb

    identity = run_dir / "wandb_id"
    if not identity.exists():
        write_atomic(identity, secrets.token_hex(8).encode())
    # The metadata hold the whole command line, where an override may be a password.
    settings = wandb.Settings(disable_git=True, x_disable_meta=True)
    offline = os.environ.get("WANDB_MODE", "online") != "online"
    resume = None if offline else "allow"
    return {
        "name": experiment_name,
        "id": identity.read_text(),
        "resume": resume,
        "dir": str(run_dir),
        "settings": settings,
    }
