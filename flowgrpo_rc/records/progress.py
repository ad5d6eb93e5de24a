"""The progress bar of a run that Python has started, on a terminal or in a notebook."""

import sys
import threading
from collections.abc import Mapping
from typing import Self

from rich.console import Console as RichConsole
from tqdm.auto import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from flowgrpo_rc.distributed.child import is_first
from flowgrpo_rc.records.metrics_file import MetricsFile

_TICK_S = 2.0
# Metric -> its name beside the bar.
SHOWN = {"reward/mean": "reward", "actor/pg_loss": "loss", "val/reward": "held-out reward"}


def is_seen() -> bool:
    """Returns whether somebody sees a bar of this process: a terminal's user or a notebook's."""
    return is_first() and (sys.stdout.isatty() or RichConsole().is_jupyter)


class ProgressBar:
    """A context manager around a run, with warnings of health.jsonl and of logs above the bar.

    Loading or a step may take minutes, so the elapsed time goes on by itself.
    """

    def __init__(self, warnings: MetricsFile, total_steps: int) -> None:
        self._warnings = warnings
        self._told = {row["message"] for row in warnings.rows()}
        self._bar = tqdm(total=total_steps, desc="loading", mininterval=0, file=sys.stdout)
        self._shown: dict[str, str] = {}
        self._ended = threading.Event()
        self._ticker = threading.Thread(target=self._tick, daemon=True)
        self._logs = logging_redirect_tqdm()

    def __enter__(self) -> Self:
        self._logs.__enter__()
        self._ticker.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._ticker.join()
        self._bar.close()
        self._logs.__exit__(None, None, None)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows a step; the first one starts the estimate, which loading is no part of."""
        bar = self._bar
        for row in self._warnings.rows():
            if row["message"] not in self._told:
                self._told.add(row["message"])
                bar.write(f"warning: {row['message']}")
        if not self._shown:
            bar.set_description("training", refresh=False)
            bar.initial = bar.n = bar.last_print_n = step
        numbers = {name: f"{metrics[key]:.3g}" for key, name in SHOWN.items() if key in metrics}
        self._shown |= numbers
        bar.set_postfix(self._shown, refresh=False)
        bar.update(step - bar.n)

    def _tick(self) -> None:
        while not self._ended.wait(_TICK_S):
            self._bar.refresh()
