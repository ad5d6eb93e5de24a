"""Small runs to harm, and the line that each fault gets at the end."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
from support.faults import Trained, command, on_change, words_of
from support.runs import STOP, final_state
from support.sharing import make_once

# All that a run imports, once for all forks.
from flowgrpo_rc.commands import train  # noqa: F401


def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """Notes for the summary which fault a test injects."""
    if call.when == "setup":
        _, _, parameters = item.name.partition("[")
        case = f" ({parameters[:-1]})" if parameters else ""
        for mark in item.iter_markers("fault"):
            item.user_properties.append(("fault", f"{mark.args[0]}{case}: {mark.args[1]}"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints a line for each fault, and how many were survived."""
    lines = []
    for outcome, word in (("passed", "survived"), ("failed", "NOT SURVIVED"), ("error", "ERROR")):
        for report in terminalreporter.stats.get(outcome, ()):
            if not isinstance(report, pytest.TestReport):
                continue  # a file that cannot be imported
            faults = [text for name, text in report.user_properties if name == "fault"]
            lines += [(word, text) for text in faults]
    survived = sum(word == "survived" for word, _ in lines)
    for word, text in sorted(lines, key=lambda line: line[1]):
        terminalreporter.write_line(f"{word:12} {text}")
    terminalreporter.write_line(f"{survived} of {len(lines)} faults survived")


@pytest.fixture
def small(overrides: list[str]) -> list[str]:
    """Overrides of a run of three small steps that saves each and evaluates before and after."""
    own = """trainer.total_training_steps=3 trainer.save_freq=1 trainer.test_freq=3
        rollout.val_kwargs.n=2 rollout.dtype=bf16 actor.optim.lr_scheduler=linear
        actor.ema.update_interval=3"""
    return [*overrides, *own.split()]


@pytest.fixture(scope="session")
def trained(shared: Path) -> Callable[[Sequence[str]], Trained]:
    """Returns a run that nothing has happened to, by its words; each is trained once."""

    @cache
    def run(words: tuple[str, ...]) -> Trained:
        def make(folder: Path) -> None:
            folder.mkdir()
            last = folder / "last_change"
            count = on_change(folder / "run", lambda number: last.write_text(str(number)) and None)
            ended = command(*words_of(words, f"trainer.output_dir={folder / 'run'}"), harm=count)
            assert ended.code == (75 if STOP in words else 0), ended.output

        name = hashlib.sha256(repr(words).encode()).hexdigest()[:16]
        folder = make_once(shared / "unharmed" / name, make)
        run, last = folder / "run", folder / "last_change"
        return Trained(run, final_state(run), int(last.read_text()) + 1)

    return lambda words: run(tuple(word for word in words if "output_dir" not in word))


@pytest.fixture
def whole(small: list[str], trained: Callable[[Sequence[str]], Trained]) -> Trained:
    """A run of `small` that nothing has happened to; harm a copy of it."""
    return trained(small)


@pytest.fixture
def begun(small: list[str], trained: Callable[[Sequence[str]], Trained], tmp_path: Path) -> Path:
    """The folder of a run of `small` that was stopped after its first step, to harm."""
    return Path(shutil.copytree(trained([*small, STOP]).folder, tmp_path / "run"))


@pytest.fixture
def finished(whole: Trained, tmp_path: Path) -> Path:
    """The folder of a finished run of `small`, to harm."""
    return Path(shutil.copytree(whole.folder, tmp_path / "run"))
