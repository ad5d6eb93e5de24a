"""Experiment trackers, through accelerate.

Nothing secret leaves the process: configurations pass through `redact`, rewards are told by name
and weight alone, and the collection of the command line and the git remote by wandb and swanlab is
switched off.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from flowgrpo_rc.files import write_atomic
from flowgrpo_rc.plugins import check_choice
from flowgrpo_rc.records.run_folder import flat_settings
from flowgrpo_rc.redaction import redact

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.tracking import GeneralTracker

logger = logging.getLogger(__name__)

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
        check_choice("trainer.logger", name, LOGGERS)
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

    No tracker ends a run, since metrics.jsonl is the record: one that raises is off from then on.
    `first_step` is that of this command; it is above 0 if the run is resumed.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        *,
        project_name: str,
        experiment_name: str,
        run_dir: Path,
        config: Mapping[str, object],
        first_step: int = 0,
    ) -> None:
        self._running: dict[str, GeneralTracker] = {}
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        names = [str(name) for name in accelerator.log_with] if accelerator.is_main_process else []
        safe = _shared(config)
        for name in names:
            with self._surviving(name):
                id_file = run_dir / f"{name}_id"
                options = _options(name, experiment_name, run_dir, id_file, first_step)
                if name == "wandb":
                    options["config"] = safe
                kind = LOGGER_TYPE_TO_CLASS[name]
                place = [accelerator.logging_dir] if kind.requires_logging_directory else []
                tracker = kind(project_name, *place, **options)
                tracker.start()
                never_again = name == "mlflow" and id_file.exists()  # it never changes a setting
                if name in _TAKE_SETTINGS and not never_again:
                    tracker.store_init_configuration(flat_settings(safe))
                if name in _GIVES_ID:
                    write_atomic(id_file, _GIVES_ID[name](tracker.tracker).encode())
                self._running[name] = tracker

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs the metrics of a step."""
        self._each(lambda _, tracker: tracker.log(dict(metrics), step=step))

    def log_image(self, step: int, name: str, image: Image.Image) -> None:
        """Logs an image of a step under a name."""
        self._each(lambda tracker_name, tracker: _image(tracker_name, tracker, step, name, image))

    def alert(self, step: int, text: str) -> None:
        """Sends a warning to the people who watch the run, if a tracker can, as wandb does."""
        alert = {"title": f"step {step}: rollout correction", "text": text, "level": "WARN"}
        if "wandb" in self._running:
            with self._surviving("wandb"):
                self._running["wandb"].tracker.alert(**alert, wait_duration=0)

    def finish(self) -> None:
        """Ends the trackers."""
        self._each(lambda _, tracker: tracker.finish())

    def _each(self, act: Callable[[str, GeneralTracker], None]) -> None:
        for name, tracker in list(self._running.items()):
            with self._surviving(name):
                act(name, tracker)

    @contextmanager
    def _surviving(self, name: str) -> Iterator[None]:
        """Switches a tracker off, with a warning, if it raises."""
        try:
            yield
        # The border to other people's programs and servers: each tracker raises what it likes.
        except (Exception, SystemExit) as error:
            self._running.pop(name, None)
            logger.warning(
                "the tracker %s has failed and is off for the rest of this command; metrics.jsonl "
                "has all numbers: %s: %s",
                *(name, type(error).__name__, redact(str(error))),
            )


def _image(name: str, tracker: GeneralTracker, step: int, key: str, image: Image.Image) -> None:
    match name:
        case "tensorboard":
            batch = np.asarray(image.convert("RGB"))[None]
            tracker.log_images({key: batch}, step=step, dataformats="NHWC")
        case "trackio":
            import trackio

            tracker.log({key: trackio.Image(image)}, step=step)
        case "mlflow":
            import mlflow

            mlflow.log_image(image, key=key, step=step)
        case _:
            tracker.log_images({key: image if name == "aim" else [image]}, step=step)


def _options(
    name: str, experiment_name: str, run_dir: Path, id_file: Path, first_step: int
) -> dict[str, object]:
    """Returns what a tracker starts with: the name of the run, and how it goes on if resumed."""
    known_id = id_file.read_text() if id_file.exists() else None
    named: dict[str, object] = {"name": experiment_name, "resume": "allow"}
    match name:
        case "wandb":
            import wandb

            if _wandb_is_offline():
                named["resume"] = None
            # wandb's metadata would hold the command line, where an override may be a password.
            settings = wandb.Settings(disable_git=True, x_disable_meta=True)
            return {**named, "id": _own_id(id_file), "dir": str(run_dir), "settings": settings}
        case "tensorboard":
            return {"purge_step": first_step} if first_step > 0 else {}
        case "trackio":
            return named if first_step > 0 else named | {"resume": "never"}
        case "swanlab":
            import swanlab

            # Its description of the process holds the command line, as wandb's does.
            quiet = swanlab.Settings(probe={"runtime": False, "git": False})
            folder = str(run_dir / "swanlab")
            return {**named, "id": _own_id(id_file), "log_dir": folder, "settings": quiet}
        case "mlflow":
            return {"run_name": experiment_name, "run_id": known_id}
        case "aim":
            options = {"run_hash": known_id, "capture_terminal_logs": False}
            return {"experiment": experiment_name, "system_tracking_interval": None, **options}
    raise AssertionError(name)


def _shared(config: Mapping[str, Any]) -> dict[str, object]:
    """Returns the settings that trackers are told: of the rewards, names and weights alone."""
    reward = config.get("reward", {})
    weights = {
        name: {"weight": term.get("weight", 1.0)}
        for name, term in reward.get("terms", {}).items()
        if term is not None
    }
    return dict(redact({**config, "reward": {**reward, "terms": weights}}))


def _own_id(path: Path) -> str:
    """The id of the run that a file holds; a new one if there is no file."""
    if not path.exists():
        write_atomic(path, secrets.token_hex(8).encode())
    return path.read_text()


def _wandb_is_offline() -> bool:
    return os.environ.get("WANDB_MODE", "online") != "online"
