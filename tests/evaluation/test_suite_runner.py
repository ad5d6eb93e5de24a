"""Asking a suite: the same noises for both policies, numbers by hand, and shares of processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from accelerate import Accelerator

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.distributed.processes import Processes
from flowgrpo_rc.evaluation.held_out import HeldOut
from flowgrpo_rc.evaluation.suite import Suite, SuiteProtocol, read_suite
from flowgrpo_rc.evaluation.suite_runner import SuiteRunner

PROTOCOL = SuiteProtocol({}, "1a2b3c4d")
RED = """
def red(image, prompt):
    value = float(image[0, 0, 0])
    return None if value == 13 else value
"""


class Painter:
    """A model that paints its images in one shade: the base 10 of 255 above the seed's digits.

    Attributes:
      gain: what the tuned model adds, by index of the prompt.
      asked: (whether it was the base, index of the prompt, seed) of each sample.
    """

    def __init__(self, gain: Sequence[int]) -> None:
        self.gain = gain
        self.asked: list[tuple[bool, int, int]] = []
        self._is_base = False

    def sample(
        self, prompts: Sequence[Prompt], seeds: Sequence[int], *, decode: bool = True
    ) -> HeldOut:
        shades = []
        for prompt, seed in zip(prompts, seeds, strict=True):
            self.asked.append((self._is_base, prompt.index, seed))
            gain = 0 if self._is_base else self.gain[prompt.index]
            shades.append(10 + seed % 7 + gain)
        images = np.zeros((len(prompts), 4, 4, 3), np.uint8)
        images[:] = np.array(shades, np.uint8).reshape(-1, 1, 1, 1)
        return HeldOut(images)

    @contextmanager
    def base(self) -> Iterator[None]:
        self._is_base = True
        yield
        self._is_base = False


@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Suite:
    """Four prompts in two groups, three samples of each."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "shades.py").write_text(RED)
    rows = [f'{{"prompt": "p{i}", "kind": "{"ab"[i % 2]}"}}\n' for i in range(4)]
    (tmp_path / "own.jsonl").write_text("".join(rows))
    reward = "{terms: {red: {_target_: function, path: 'shades:red', weight: 0.5}}}"
    (tmp_path / "mine.yaml").write_text(
        f"prompts: own.jsonl\nreward: {reward}\nseeds: 3\nby: kind\n"
    )
    return read_suite(str(tmp_path / "mine.yaml"))


def test_both_policies_start_from_the_same_noises(suite: Suite) -> None:
    painter = Painter([20, 40, 60, 80])
    runner = SuiteRunner(suite, painter.sample, painter.base, batch_size=5, protocol=PROTOCOL)
    processes = Processes(Accelerator(cpu=True))
    first = runner.run(processes, show=True)
    again = runner.run(processes)
    runner.close()
    base = [(index, seed) for is_base, index, seed in painter.asked if is_base]
    tuned = [(index, seed) for is_base, index, seed in painter.asked if not is_base]
    assert len(set(base)) == 12  # the base is asked once
    assert tuned == base * 2
    assert len({seed for _, seed in base}) == 12
    assert first.comparisons == again.comparisons
    # The shade is 10 + seed % 7 (+ gain); 13 cannot be scored, and leaves both policies.
    shades = np.full((4, 3), np.nan)
    places = dict.fromkeys(range(4), 0)
    for index, seed in base:
        shades[index, places[index]] = np.nan if seed % 7 == 3 else 10 + seed % 7
        places[index] += 1
    assert np.isnan(shades).any()
    np.testing.assert_allclose(first.base.columns["red"], shades)
    np.testing.assert_allclose(first.base.columns["reward"], shades / 2)
    comparison = first.comparisons["red"]
    assert comparison.change.mean == pytest.approx(50)
    assert comparison.change.high - 50 == pytest.approx(
        3.182446 * np.std([20, 40, 60, 80], ddof=1) / 2
    )
    assert comparison.base.mean == pytest.approx(np.nanmean(shades, axis=1).mean())
    assert first.comparisons["reward"].change.mean == pytest.approx(25)
    assert {name: group.change.mean for name, group in first.groups.items()} == {
        "a": pytest.approx(20),
        "b": pytest.approx(30),
    }
    shown = [10 + seed % 7 + gain for (_, seed), gain in zip(base, (20, 40, 60, 80), strict=False)]
    assert [int(image[0, 0, 0]) for image in first.tuned.shown] == shown
    assert len(again.tuned.shown) == 0
    metrics = first.metrics().compute()
    assert metrics["suite/mine/change"] == pytest.approx(25)
    assert metrics["suite/mine/change_low"] == pytest.approx(comparison.change.low / 2)
    assert metrics["suite/mine/reward"] == pytest.approx(first.comparisons["reward"].tuned.mean)
    assert metrics["suite/mine/failed_fraction"] == 0


def test_samples_do_not_depend_on_the_batch(suite: Suite) -> None:
    seeds = []
    for batch_size in (1, 12):
        painter = Painter([1, 2, 3, 4])
        runner = SuiteRunner(
            suite, painter.sample, painter.base, batch_size=batch_size, protocol=PROTOCOL
        )
        runner.run(Processes(Accelerator(cpu=True)))
        runner.close()
        seeds.append(painter.asked)
    assert seeds[0] == seeds[1]
