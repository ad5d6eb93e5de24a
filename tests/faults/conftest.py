"""Small runs to harm, and the line that each fault gets at the end."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from support.faults import FinalState, command, final_state, words_of

# All that a run imports, once for all forks.
from flowgrpo_rc.commands import train  # noqa: F401


def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """Notes for the summary which fault a test injects."""
    mark = item.get_closest_marker("fault")
    if mark is not None and call.when == "setup":
        _, _, parameters = item.name.partition("[")
        case = f" ({parameters[:-1]})" if parameters else ""
        item.user_properties.append(("fault", f"{mark.args[0]}{case}: {mark.args[1]}"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints a line for each fault, and how many were survived."""
    lines = []
    for outcome, word in (("passed", "survived"), ("failed", "NOT SURVIVED"), ("error", "ERROR")):
        for report in terminalreporter.stats.get(outcome, ()):
            faults = [text for name, text in report.user_properties if name == "fault"]
            lines += [(word, text) for text in faults]
    survived = sum(word == "survived" for word, _ in lines)
    for word, text in sorted(lines, key=lambda line: line[1]):
        terminalreporter.write_line(f"{word:12} {text}")
    terminalreporter.write_line(f"{survived} of {len(lines)} faults survived")


@pytest.fixture
def small(overrides: list[str]) -> list[str]:
    """Overrides of a run of three small steps that saves each and evaluates before and after."""
    return [
        *overrides,
        "trainer.total_training_steps=3",
        "trainer.save_freq=1",
        "trainer.test_freq=3",
        "rollout.val_kwargs.n=2",
    ]


@pytest.fixture
def finished(small: list[str], tmp_path: Path) -> Path:
    """The folder of a finished run of `small`; another command may go on in it or harm it."""
    ended = command(*words_of(small))
    assert ended.code == 0, ended.output
    return tmp_path / "run"


@pytest.fixture(scope="session")
def _trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., FinalState]:
    @cache
    def state(*words: str) -> FinalState:
        run = tmp_path_factory.mktemp("whole") / "run"
        ended = command(*words_of(words, f"trainer.output_dir={run}"))
        assert ended.code == 0, ended.output
        return final_state(run)

    return state


@pytest.fixture
def undisturbed(small: list[str], _trained: Callable[..., FinalState]) -> FinalState:
    """The final state of `small` if nothing happens to it; trained once for all tests."""
    return _trained(*(word for word in small if not word.startswith("trainer.output_dir=")))
