"""Experiment trackers, through accelerate.

Nothing secret leaves the process: configurations pass through `redact`, rewards are told by name
and weight alone, and the collection of the command line and the git remote by wandb and swanlab is
switched off.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from flowgrpo_rc.files import redact, write_atomic
from flowgrpo_rc.monitoring.histograms import Counts, edges
from flowgrpo_rc.records.run_folder import flat_settings

if TYPE_CHECKING:
    from accelerate import Accelerator

LOGGERS = ("console", "wandb", "tensorboard", "trackio", "swanlab", "mlflow", "aim")

# Trackers that store the settings of a run as a flat mapping.
_TAKE_SETTINGS = ("trackio", "swanlab", "mlflow", "aim")
# How a tracker that gives a run its id says it.
_GIVES_ID: dict[str, Callable[[Any], str]] = {
    "mlflow": lambda run: run.info.run_id,
    "aim": lambda run: run.hash,
}


def validate_loggers(loggers: Sequence[str]) -> None:
    """Raises ValueError for a logger that does not exist or whose package is missing."""
    for name in loggers:
        if name not in LOGGERS:
            raise ValueError(
                f"trainer.logger: {name!r} is unknown; allowed are {', '.join(LOGGERS)}"
            )
        if name != "console" and importlib.util.find_spec(name) is None:
            raise ValueError(
                f"trainer.logger: {name!r} needs the package {name}, which is not installed: pip "
                f"install {name}"
            )


def check_login(loggers: Sequence[str]) -> None:
    """Raises ValueError if wandb is asked for and nobody is logged in. Needs no network."""
    if "wandb" not in loggers or _wandb_is_offline():
        return
    import wandb

    if not wandb.login(prompt=False, verify=False):
        raise ValueError(
            "trainer.logger: wandb has no login: run `wandb login`, set WANDB_API_KEY, keep the "
            "data here with WANDB_MODE=offline, or set trainer.logger=[console]"
        )


def accelerate_loggers(loggers: Sequence[str]) -> list[str]:
    """Returns the loggers for `Accelerator(log_with=...)`: all but the console."""
    return [name for name in dict.fromkeys(loggers) if name != "console"]


class Trackers:
    """The trackers of an Accelerator that was made with `log_with=accelerate_loggers(...)`.

    Only the main process has any. A resumed run continues the same run of a tracker, whose id is
    stored in the run's folder; trackio finds it by its name. tensorboard hides the events of
    repeated steps.

    Args:
      accelerator: holds the trackers.
      project_name: name of the project in the trackers.
      experiment_name: name of the run in the trackers.
      run_dir: folder of the run.
      config: the resolved configuration; secrets and the options of rewards are removed from it.
      first_step: first step of this command; above 0 if the run is resumed.

    Raises:
      ValueError: a tracker does not start, for want of a login or a server.
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
        self._names = (
            [str(name) for name in accelerator.log_with] if accelerator.is_main_process else []
        )
        if not self._names:
            return
        safe = _shared(config)
        ids = {name: run_dir / f"{name}_id" for name in self._names}
        settings = {
            name: _settings(name, experiment_name, run_dir, ids[name], first_step)
            for name in self._names
        }
        if "wandb" in settings:
            settings["wandb"]["config"] = safe
        try:
            accelerator.init_trackers(project_name, init_kwargs=settings)
        # The border to other people's servers: each tracker raises what it likes.
        except Exception as error:
            raise ValueError(
                f"trainer.logger={[*self._names]}: a tracker did not start: {error}"
            ) from error
        for name in (name for name in self._names if name in _TAKE_SETTINGS):
            tracker = accelerator.get_tracker(name)
            if not ids[name].exists() or name != "mlflow":  # which never changes a setting
                tracker.store_init_configuration(flat_settings(safe))
            if name in _GIVES_ID:
                write_atomic(ids[name], _GIVES_ID[name](tracker.tracker).encode())

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs the metrics of a step."""
        if self._names:
            self._accelerator.log(dict(metrics), step=step)

    def log_image(self, step: int, name: str, image: Image.Image) -> None:
        """Logs an image of a step under a name."""
        for tracker_name in self._names:
            tracker = self._accelerator.get_tracker(tracker_name)
            if tracker_name in ("wandb", "swanlab"):
                tracker.log_images({name: [image]}, step=step)
            elif tracker_name == "aim":
                tracker.log_images({name: image}, step=step)
            elif tracker_name == "tensorboard":
                batch = np.asarray(image.convert("RGB"))[None]
                tracker.log_images({name: batch}, step=step, dataformats="NHWC")
            elif tracker_name == "trackio":
                import trackio

                tracker.log({name: trackio.Image(image)}, step=step)
            elif tracker_name == "mlflow":
                import mlflow

                mlflow.log_image(image, key=name, step=step)

    def log_histograms(self, step: int, found: Mapping[str, Counts]) -> None:
        """Logs histograms of a step, with the bins of `monitoring.histograms`."""
        for name, counts in found.items():
            numbers = range(min(counts, default=0), max(counts, default=0) + 1)
            heights = [counts.get(number, 0) for number in numbers]
            if "wandb" in self._names:
                import wandb

                histogram = wandb.Histogram(
                    np_histogram=(np.array(heights), np.array(edges(numbers)))
                )
                self._accelerator.get_tracker("wandb", unwrap=True).log(
                    {f"histograms/{name}": histogram}, step=step
                )
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
        """Sends a warning to the people who watch the run, if a tracker can, as wandb does."""
        if "wandb" in self._names:
            run = self._accelerator.get_tracker("wandb", unwrap=True)
            run.alert(
                title=f"step {step}: rollout correction", text=text, level="WARN", wait_duration=0
            )

    def finish(self) -> None:
        """Ends the trackers."""
        for name in self._names:
            self._accelerator.get_tracker(name).finish()


def _settings(
    name: str, experiment_name: str, run_dir: Path, id_file: Path, first_step: int
) -> dict[str, Any]:
    """Returns what a tracker starts with: the name of the run, and how it goes on if resumed."""
    known_id = id_file.read_text() if id_file.exists() else None
    match name:
        case "wandb":
            return _wandb_settings(experiment_name, run_dir, _own_id(id_file))
        case "tensorboard":
            return {"purge_step": first_step} if first_step > 0 else {}
        case "trackio":
            return {"name": experiment_name, "resume": "allow" if first_step > 0 else "never"}
        case "swanlab":
            return _swanlab_settings(experiment_name, run_dir, _own_id(id_file))
        case "mlflow":
            return {"run_name": experiment_name, "run_id": known_id}
        case "aim":
            options = {"run_hash": known_id, "capture_terminal_logs": False}
            return {"experiment": experiment_name, "system_tracking_interval": None, **options}
    raise AssertionError(name)


def _shared(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings that trackers are told: of the rewards, names and weights alone."""
    terms = config.get("reward", {}).get("terms", {})
    weights = {name: {"weight": (term or {}).get("weight", 1.0)} for name, term in terms.items()}
    return dict(redact({**config, "reward": {**config.get("reward", {}), "terms": weights}}))


def _own_id(path: Path) -> str:
    """The id of the run that a file holds; a new one if there is no file."""
    if not path.exists():
        write_atomic(path, secrets.token_hex(8).encode())
    return path.read_text()


def _wandb_settings(experiment_name: str, run_dir: Path, identity: str) -> dict[str, Any]:
    import wandb

    # wandb's metadata would hold the whole command line, where an override may be a password.
    settings = wandb.Settings(disable_git=True, x_disable_meta=True)
    resume = None if _wandb_is_offline() else "allow"
    return {
        "name": experiment_name,
        "id": identity,
        "resume": resume,
        "dir": str(run_dir),
        "settings": settings,
    }


def _swanlab_settings(experiment_name: str, run_dir: Path, identity: str) -> dict[str, Any]:
    import swanlab

    # Its description of the process holds the command line, as wandb's does.
    settings = swanlab.Settings(probe={"runtime": False, "git": False})
    return {
        "name": experiment_name,
        "id": identity,
        "resume": "allow",
        "log_dir": str(run_dir / "swanlab"),
        "settings": settings,
    }


def _wandb_is_offline() -> bool:
    return os.environ.get("WANDB_MODE", "online") != "online"
