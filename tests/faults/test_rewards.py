"""A reward that fails costs the samples that it concerns, or ends the run and says why."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.faults import command, fault, words_of
from support.runs import num_rows, read_rows

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.rewards.base import Reward, Scores


class Faulty(Reward):
    """Scores by length, with a fault that may depend on the rows of a run's metrics."""

    def __init__(self, *, how: str, run: str) -> None:
        self.how = how
        self.run = Path(run)

    def __call__(self, samples: Any, prompts: Sequence[Prompt]) -> Any:
        values = [float(len(prompt.text)) for prompt in prompts]
        match self.how:
            case "hangs":
                time.sleep(300)
            case "hangs until a step is over":
                while num_rows(self.run) < 2:
                    time.sleep(0.01)
            case "is slow in step 2":
                time.sleep(1.5 if num_rows(self.run) == 2 else 0)
            case "calls sys.exit":
                raise SystemExit(0)
        return Scores(values=values)


SAID = {
    "hangs": "TimeoutError: the call took longer than reward.timeout_s=1",
    "calls sys.exit": "SystemExit: 0",
}


@pytest.fixture
def faulty(small: list[str], tmp_path: Path):
    """Returns the words of a training whose only reward has a fault."""

    def words(how: str, *further: str) -> list[str]:
        reward = f"{{_target_: {__name__}.Faulty, how: {how}, run: '{tmp_path / 'run'}'}}"
        only = ("reward.terms.jpeg=null", f"+reward.terms.mine={reward}", "reward.timeout_s=1")
        return words_of(small, *only, *further)

    return words


@fault("a reward fails for all samples", "exit code 1; one line names the reward and its error")
@pytest.mark.parametrize("how", SAID)
def test_a_reward_that_always_fails(faulty, how: str) -> None:
    ended = command(*faulty(how))
    assert ended.code == 1, ended.output
    assert ended.error().startswith("error: reward 'mine' failed for 2 of 2 samples")
    assert SAID[how] in ended.error()
    assert ended.seconds < 30


@fault(
    "a reward hangs for a while, and the run allows failures",
    "the samples of that time have no reward; later ones are scored again",
)
def test_a_reward_that_hangs_for_a_while(faulty, tmp_path: Path) -> None:
    words = faulty("hangs until a step is over", "reward.max_failed_fraction=1")
    ended = command(*words)
    assert ended.code == 0, ended.output
    assert "time.sleep(0.01)" in ended.output  # where it hangs
    rows = read_rows(tmp_path / "run")
    assert [row.get("reward/failed_fraction") for row in rows] == [None, 1, 0, 0]
    assert [row.get("val/failed_fraction") for row in rows] == [1, None, None, 0]
    assert ended.output.count("reward 'mine' failed for") == 1


@fault("a reward is slower than its limit", "exit code 1; the run goes on with a larger limit")
def test_a_reward_that_is_slow(faulty, tmp_path: Path) -> None:
    assert command(*faulty("is slow in step 2")).code == 1
    assert read_rows(tmp_path / "run")[-1]["step"] == 1
    command(*faulty("is slow in step 2", "reward.timeout_s=30")).expect(0)
    assert read_rows(tmp_path / "run")[-1]["step"] == 3
