"""Where numbers go: metrics.jsonl always, wandb and tensorboard through accelerate when asked for.

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
    """ValueError where `trainer.logger` names a logger that does not exist or whose package is
    missing.
    """
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


def accelerate_loggers(loggers: Sequence[str]) -> list[str]:
    """What `Accelerator(log_with=..., project_dir=run_dir)` takes: the loggers other than the
    console.
    """
    return [name for name in dict.fromkeys(loggers) if name != "console"]


class Trackers:
    """The trackers of an Accelerator that was made with `log_with=accelerate_loggers(...)`, on its
    main process.

    A resumed run goes on in the same wandb run, whose id stands in the run's folder; tensorboard
    hides the events of steps that are done again (those from `first_step` on).
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
        if self._names:
            self._accelerator.log(dict(metrics), step=step)

    def log_image(self, step: int, name: str, image: Image.Image) -> None:
        if "wandb" in self._names:
            self._accelerator.get_tracker("wandb").log_images({name: [image]}, step=step)
        if "tensorboard" in self._names:
            batch = np.asarray(image.convert("RGB"))[None]
            self._accelerator.get_tracker("tensorboard").log_images(
                {name: batch}, step=step, dataformats="NHWC"
            )

    def log_histograms(self, step: int, found: Mapping[str, Counts]) -> None:
        """Histograms in the bins of `training.histograms`."""
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
        """Tell the people who watch the run, where a tracker can: wandb sends mails and
        messages.
        """
        if "wandb" in self._names:
            run = self._accelerator.get_tracker("wandb", unwrap=True)
            run.alert(
                title=f"step {step}: rollout correction", text=text, level="WARN", wait_duration=0
            )

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
