"""The console output of a training run: a live view on a terminal, else one line for each step."""

import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TextIO

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column, Table
from rich.text import Text

from flowgrpo_rc.evaluation.intervals import PolicyComparison

_STEPS_FOR_ETA = 20
_REWARD = "val/reward"
_FAILED = "val/failed_fraction"
# Metric -> how the line of a step shows it.
_SHOWN = {
    "reward/mean": "  reward {:.3f}",
    "val/reward": "  val {:.3f}",
    "perf/samples_per_second": "  {:.1f} samples/s",
}


class Console:
    """A context manager around the loop, which prints to a stream or the standard output.

    `quiet` silences every method, as in all processes but the main one. Without `show_steps` (a
    `trainer.logger` without `console`) messages, warnings and the final table stay.
    """

    def __init__(
        self,
        *,
        total_steps: int,
        quiet: bool = False,
        show_steps: bool = True,
        stream: TextIO | None = None,
    ) -> None:
        self._total_steps = total_steps
        self._quiet = quiet
        self._show_steps = show_steps and not quiet
        self._stream = stream if stream is not None else sys.stdout
        self._rich = RichConsole(file=self._stream, highlight=False, markup=False)
        self._progress: Progress | None = None
        self._last: dict[str, float] = {}
        self._warned: set[str] = set()
        self._marks: deque[tuple[int, float]] = deque(maxlen=_STEPS_FOR_ETA + 1)

    def __enter__(self) -> "Console":
        if self._show_steps and self._rich.is_terminal:
            steps = "step {task.completed}/{task.total}"
            # In a narrow window the bar goes first and these numbers last.
            width = len(f"step {self._total_steps}/{self._total_steps}")
            column = TextColumn(steps, table_column=Column(no_wrap=True, min_width=width))
            bar = (BarColumn(bar_width=None), TextColumn("{task.fields[now]}"))
            self._progress = Progress(column, *bar, console=self._rich, expand=True)
            self._progress.add_task("train", total=self._total_steps, now="")
            self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def message(self, text: str) -> None:
        """Prints a line."""
        if not self._quiet:
            self._print(Text(text), text)

    def warning(self, text: str) -> None:
        """Prints a warning, the first time only."""
        if not self._quiet and text not in self._warned:
            self._warned.add(text)
            self._print(Text.assemble(("warning: ", "bold yellow"), text), f"warning: {text}")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows the metrics of a step; step 0 holds the first evaluation."""
        if not self._show_steps:
            return
        self._marks.append((step, time.monotonic()))
        self._last |= metrics
        if self._progress is None:
            line = f"step {step}/{self._total_steps}{_summary(metrics)}{self._eta()}"
            print(line, file=self._stream, flush=True)
        else:
            numbers = f"{_summary(self._last)}{self._eta()}".strip()
            self._progress.update(self._progress.task_ids[0], completed=step, now=numbers)

    def final_table(self, before: Mapping[str, float], after: Mapping[str, float]) -> None:
        """Prints the held-out metrics before and after training; "-" where one side has none."""
        if self._quiet:
            return
        table = _table("held-out evaluation", ("metric", "before", "after", "change"))
        for name, label in _told((before, after)).items():
            first = before.get(name)
            last = after.get(name)
            change = "-" if first is None or last is None else f"{last - first:+.4f}"
            numbers = ["-" if value is None else f"{value:.4f}" for value in (first, last)]
            table.add_row(label, *numbers, change)
        self._rich.print(table)

    def suite_table(
        self,
        name: str,
        comparisons: Mapping[str, PolicyComparison],
        groups: Mapping[str, PolicyComparison],
    ) -> None:
        """Prints what two policies got in a suite, by score and by group of prompts."""
        if self._quiet:
            return
        columns = ("score", "prompts", "base", "LoRA", "change", "95% interval")
        table = _table(f"suite {name}", columns)
        for row, comparison in [*comparisons.items(), *groups.items()]:
            change = comparison.change
            interval = f"{change.low:+.4f} to {change.high:+.4f}"
            scores = (f"{score.mean:.4f}" for score in (comparison.base, comparison.tuned))
            count = str(comparison.num_prompts)
            table.add_row(row, count, *scores, f"{change.mean:+.4f}", interval)
        self._rich.print(table)

    def _print(self, styled: Text, plain: str) -> None:
        if self._rich.is_terminal:
            self._rich.print(styled, soft_wrap=True)
        else:
            print(plain, file=self._stream, flush=True)

    def _eta(self) -> str:
        first_step, first_time = self._marks[0]
        step, last_time = self._marks[-1]
        if step == first_step or step >= self._total_steps:
            return ""
        seconds = (last_time - first_time) / (step - first_step) * (self._total_steps - step)
        minutes, seconds = divmod(round(seconds), 60)
        hours, minutes = divmod(minutes, 60)
        if hours:
            return f"  eta {hours}h{minutes:02d}m"
        return f"  eta {minutes}m{seconds:02d}s" if minutes else f"  eta {seconds}s"


def _summary(metrics: Mapping[str, float]) -> str:
    return "".join(text.format(metrics[name]) for name, text in _SHOWN.items() if name in metrics)


def _told(evaluations: Sequence[Mapping[str, float]]) -> dict[str, str]:
    """Returns the metrics that a reader of the table wants, and what they are called there."""
    names = dict.fromkeys(name for metrics in reversed(evaluations) for name in metrics)
    names.pop("val/std", None)
    if not any(metrics.get(_FAILED) for metrics in evaluations):
        names.pop(_FAILED, None)
    labels = {name: name.removeprefix("val/") for name in names}
    terms = [name for name in names if name.count("/") == 1 and name not in (_REWARD, _FAILED)]
    # A lone term of weight 1 is the reward.
    if len(terms) == 1 and all(
        metrics.get(terms[0]) == metrics.get(_REWARD) for metrics in evaluations
    ):
        labels[_REWARD] = f"reward ({labels.pop(terms[0])})"
    return labels


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left")
    return table
