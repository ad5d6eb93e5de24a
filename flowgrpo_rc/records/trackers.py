"""Experiment trackers: wandb and tensorboard, through accelerate.

Nothing secret leaves the process: configurations pass through `redact`, and wandb's own collection
of the command line and the git remote is switched off.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from flowgrpo_rc.files import redact, write_atomic
from flowgrpo_rc.monitoring.histograms import Counts, edges

if TYPE_CHECKING:
    from accelerate import Accelerator

LOGGERS = ("console", "wandb", "tensorboard")


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

    Only the main process has any. A resumed run continues the same wandb run, whose id is stored in
    the run's folder; tensorboard hides the events of repeated steps.

    Args:
      accelerator: holds the trackers.
      project_name: name of the project in the trackers.
      experiment_name: name of the run in the trackers.
      run_dir: folder of the run.
      config: the resolved configuration; secrets are removed from it.
      first_step: first step of this command; above 0 if the run is resumed.
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
        settings: dict[str, dict[str, Any]] = {}
        if "wandb" in self._names:
            settings["wandb"] = _wandb_settings(experiment_name, run_dir) | {
                "config": redact(config)
            }
        if "tensorboard" in self._names and first_step > 0:
            settings["tensorboard"] = {"purge_step": first_step}
        if self._names:
            accelerator.init_trackers(project_name, init_kwargs=settings)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs the metrics of a step."""
        if self._names:
            self._accelerator.log(dict(metrics), step=step)

    def log_image(self, step: int, name: str, image: Image.Image) -> None:
        """Logs an image of a step under a name."""
        if "wandb" in self._names:
            self._accelerator.get_tracker("wandb").log_images({name: [image]}, step=step)
        if "tensorboard" in self._names:
            batch = np.asarray(image.convert("RGB"))[None]
            self._accelerator.get_tracker("tensorboard").log_images(
                {name: batch}, step=step, dataformats="NHWC"
            )

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


def _wandb_settings(experiment_name: str, run_dir: Path) -> dict[str, Any]:
    import wandb

    identity = run_dir / "wandb_id"
    if not identity.exists():
        write_atomic(identity, secrets.token_hex(8).encode())
    # wandb's metadata would hold the whole command line, where an override may be a password.
    settings = wandb.Settings(disable_git=True, x_disable_meta=True)
    resume = None if _wandb_is_offline() else "allow"
    return {
        "name": experiment_name,
        "id": identity.read_text(),
        "resume": resume,
        "dir": str(run_dir),
        "settings": settings,
    }


def _wandb_is_offline() -> bool:
    return os.environ.get("WANDB_MODE", "online") != "online"
