"""Where the numbers of a step go: the files of the run's folder, the console and the trackers."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from PIL import Image

from flowgrpo_rc.records.console import Console
from flowgrpo_rc.records.metrics_file import MetricsFile, Row
from flowgrpo_rc.records.run_folder import RunFolder
from flowgrpo_rc.records.speed import SpeedWatch
from flowgrpo_rc.records.trackers import Trackers

logger = logging.getLogger(__name__)
Observer = Callable[[int, Mapping[str, float]], None]


class RunLog:
    """Writes what a step reports to every place that shall have it.

    Numbers and warnings that cannot be written end the run. What is for people to look
    at, pictures and rejected samples, does not.
    """

    def __init__(
        self,
        folder: RunFolder,
        console: Console,
        trackers: Trackers,
        speed: SpeedWatch,
        observers: Sequence[Observer] = (),
    ) -> None:
        """Opens the files of a run's folder; observers are called when all else is written."""
        self.console = console
        self.trackers = trackers
        self._speed = speed
        self._observers = observers
        self._rows = MetricsFile(folder.metrics)
        self._rejected = MetricsFile(folder.rejected)
        self._health = MetricsFile(folder.health)
        self._missed: set[str] = set()

    def write(self, step: int, metrics: Mapping[str, float], warnings: Sequence[str]) -> None:
        """Writes metrics and health warnings of a step down, on the main process."""
        self._rows.append(step, metrics)
        self.trackers.log(step, metrics)
        self.console.step(step, metrics)
        if slow := self._speed.notice(step, metrics):
            self.console.message(slow)
        for warning in warnings:
            self._health.append(step, {"message": warning})
            self.console.warning(warning)
            self.trackers.alert(step, warning)
        for observe in self._observers:
            observe(step, metrics)

    def rejected(self, step: int, rows: Sequence[Row]) -> None:
        """Writes the rejected samples of a step down, on the main process."""
        with self.spared("rejected.jsonl"):
            for row in rows:
                self._rejected.append(step, row)

    def image(self, step: int, name: str, draw: Callable[[], Image.Image | None]) -> None:
        """Has a picture written by `draw`, and gives what that returns to the trackers."""
        with self.spared(name):
            image = draw()
            if image is not None:
                self.trackers.log_image(step, name, image)

    @contextmanager
    def spared(self, name: str) -> Iterator[None]:
        """Warns if something cannot be written, the first time only."""
        try:
            yield
        # A full disk as well: the next checkpoint says so.
        except Exception as error:
            if name not in self._missed:
                self._missed.add(name)
                warning = (
                    f"{name} cannot be written, and the run goes on without (said once): {error}"
                )
                logger.warning("%s", warning, exc_info=not isinstance(error, OSError))
