"""The reward manager: weights, order, hostile rewards, what counts as a failure, configuration."""

from __future__ import annotations

import logging
import math
import threading
import time
import traceback

import numpy as np
import pytest
import torch
from support.prompts import numbered_prompts, random_images

from flowgrpo_rc.batch import Rewards
from flowgrpo_rc.rewards.base import Reward, Scores
from flowgrpo_rc.rewards.manager import (
    RewardConfig,
    RewardError,
    RewardManager,
    build_terms,
    requires_target,
)

HERE = __name__


def run(config: RewardConfig, *, chunks: tuple[int, ...] = (2, 3)) -> tuple[RewardManager, Rewards]:
    """Scores chunks of prompts numbered 0, 1, 2 ... and closes the manager."""
    manager = RewardManager(config)
    starts = np.cumsum((0, *chunks))
    handles = [
        manager.submit(random_images(n), numbered_prompts(n, int(start)))
        for n, start in zip(chunks, starts[:-1], strict=True)
    ]
    rewards = manager.collect(handles)
    manager.close()
    return manager, rewards


class Index(Reward):
    """Scores a prompt by its number, after `delay` seconds, less for later prompts.

    It fails if two calls overlap.
    """

    part_names = ("square",)

    def __init__(self, *, scale: float = 1.0, delay: float = 0.02) -> None:
        self.scale = scale
        self.delay = delay
        self.inside = 0

    def __call__(self, images, prompts):
        self.inside += 1
        assert self.inside == 1
        time.sleep(self.delay / (1 + prompts[0].index))
        self.inside -= 1
        values = [self.scale * prompt.index for prompt in prompts]
        return Scores(values=values, parts={"square": [value**2 for value in values]})


class Returns(Reward):
    """Returns what `what` makes of its scores; the plain ones for a chunk without prompt 2."""

    def __init__(self, *, what: str) -> None:
        self.what = what

    def __call__(self, images, prompts):
        values = [float(prompt.index) for prompt in prompts]
        if 2 not in [prompt.index for prompt in prompts]:
            return Scores(values=values)
        if self.what == "raise":
            raise KeyError("broken on purpose")
        return {
            "none": None,
            "list": values,
            "short": Scores(values=values[:-1]),
            "long": Scores(values=[*values, 1.0]),
            "no values": Scores(values=None),
            "undeclared part": Scores(values=values, parts={"surprise": values}),
            "nan": Scores(values=[math.nan, *values[1:]]),
            "inf": Scores(values=[-math.inf, *values[1:]]),
            "text": Scores(values=["0.5", *values[1:]]),
            "array": Scores(values=np.array([np.nan, *values[1:]], np.float32)),
            "mapping": Scores(values=dict(enumerate(values))),
            "set": Scores(values=set(values)),
        }[self.what]


class Hangs(Reward):
    """Waits at prompt 0 until it may go on."""

    goes_on = threading.Event()

    def __call__(self, images, prompts):
        if prompts[0].index == 0:
            self.goes_on.wait(60)
        return Scores(values=[1.0] * len(prompts))


def fails(sample, prompt):
    raise KeyError("broken on purpose")


def returns(what: str) -> dict[str, object]:
    return {"_target_": f"{HERE}.Returns", "what": what}


# --- The manager


def test_weighted_sum_in_sample_order():
    terms = {
        "a": {"_target_": f"{HERE}.Index", "weight": 2.0},
        "b": {"_target_": f"{HERE}.Index", "weight": -0.5, "scale": 10.0, "delay": 0.0},
    }
    manager, rewards = run(RewardConfig(terms=terms), chunks=(2, 3, 1, 4))
    index = torch.arange(10, dtype=torch.float64)
    keys = ["a", "a/square", "b", "b/square"]
    assert list(rewards.parts) == manager.part_keys(grouped=True) == keys
    assert torch.equal(rewards.parts["a"], index)
    assert torch.equal(rewards.parts["b"], 10 * index)
    assert torch.equal(rewards.parts["b/square"], 100 * index**2)
    assert torch.equal(rewards.total, 2 * index - 5 * index)
    assert rewards.total.dtype == torch.float64
    assert rewards.valid.all()
    assert manager.count_failed(rewards) == {"a": 0, "b": 0}


def test_submit_returns_at_once_and_close_drops_what_waits():
    manager = RewardManager(RewardConfig(terms={"a": {"_target_": f"{HERE}.Index"}}))
    start = time.monotonic()
    handles = [manager.submit(random_images(1), numbered_prompts(1)) for _ in range(100)]
    manager.close()
    assert time.monotonic() - start < 1.0
    assert handles[-1].futures["a"].cancelled()


WHOLE_CHUNK = {
    "raise": "KeyError: 'broken on purpose'",
    "none": "NoneType instead of Scores",
    "list": "list instead of Scores",
    "short": "2 scores for 3 samples",
    "long": "4 scores for 3 samples",
    "no values": "not a NoneType",
    "undeclared part": "it returned the parts ['surprise'], not part_names=()",
    "mapping": "not a dict",
    "set": "not a set",
}
SINGLE = {
    "nan": "nan is no finite number, for prompt 2",
    "inf": "-inf is no finite number",
    "text": "'0.5' is no finite number",
    "array": "nan) is no finite number",
}


@pytest.mark.parametrize("what", [*WHOLE_CHUNK, *SINGLE])
def test_failures_stay_where_they_are(what, caplog):
    config = RewardConfig(terms={"bad": returns(what), "good": {"_target_": f"{HERE}.Index"}})
    with caplog.at_level(logging.WARNING):
        manager, rewards = run(config)
    failed = [2] if what in SINGLE else [2, 3, 4]  # the second chunk holds the samples 2, 3 and 4
    lost = torch.tensor([index in failed for index in range(5)])
    assert torch.equal(rewards.valid, ~lost)
    assert torch.equal(rewards.total.isnan(), lost)
    index = torch.arange(5, dtype=torch.float64)
    assert torch.equal(rewards.total[~lost], 2 * index[~lost])
    assert rewards.parts["good"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert manager.count_failed(rewards) == {"bad": len(failed), "good": 0}
    assert (WHOLE_CHUNK | SINGLE)[what] in manager.last_error["bad"]
    assert set(manager.last_error) == {"bad"}
    assert len(caplog.records) == 1
    assert f"reward 'bad' failed for {len(failed)} of 3 samples" in caplog.text


def test_a_kind_of_failure_is_logged_once_but_counted_always(caplog):
    terms = {"x": {"_target_": "function", "path": f"{HERE}:fails"}}
    manager, rewards = run(RewardConfig(terms=terms), chunks=(2, 3, 4))
    assert manager.count_failed(rewards) == {"x": 9}
    (record,) = caplog.records
    trace = traceback.extract_tb(record.exc_info[2])
    assert [frame.name for frame in trace] == ["fails"]
    assert manager.last_error["x"].endswith(f", in fails ({__file__}:{trace[0].lineno})")


def test_too_many_failures_raise():
    manager, rewards = run(RewardConfig(terms={"x": returns("nan")}, max_failed_fraction=0.2))
    # One failure of 5 is just allowed.
    manager.check_failed_fraction(manager.count_failed(rewards), len(rewards.total))
    message = r"'x' failed for 2 of 5 samples \(40%\).*max_failed_fraction=0\.2.*prompt 2"
    with pytest.raises(RewardError, match=message):
        manager.check_failed_fraction({"x": 2}, 5)
    manager.last_error.clear()
    with pytest.raises(RewardError, match=r"last error: on another process"):
        manager.check_failed_fraction({"x": 3}, 4)


@pytest.mark.parametrize(
    ("batch", "form"),
    [
        (random_images(3), r"\[3, 16, 16, 3\] uint8"),
        ("ab", "a str of 2"),
        (["a", 3], "a list of 2"),
        (["a"], "a list of 1"),
        (random_images(2) / 1.0, r"\[2, 16, 16, 3\] float64"),
        (random_images(2).transpose(0, 3, 1, 2), r"\[2, 3, 16, 16\] uint8"),
    ],
)
def test_submit_checks_what_an_engine_made(batch, form):
    manager = RewardManager(RewardConfig(terms={"jpeg": {}}))
    with pytest.raises(ValueError, match=rf"of 2 prompts must be images .* or a list.*not {form}"):
        manager.submit(batch, numbered_prompts(2))
    manager.close()


def test_a_reward_that_hangs_costs_its_samples_and_holds_no_other_one(caplog):
    terms = {
        "late": {"_target_": f"{HERE}.Hangs", "weight": 0.0},
        "a": {"_target_": f"{HERE}.Index"},
    }
    manager = RewardManager(RewardConfig(terms=terms, timeout_s=1.0))
    handles = [manager.submit(random_images(2), numbered_prompts(2, start)) for start in (0, 2)]
    start = time.monotonic()
    rewards = manager.collect(handles)
    assert time.monotonic() - start < 10
    assert rewards.total.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert rewards.parts["late"].isnan().all()
    assert manager.count_failed(rewards) == {"late": 4, "a": 0}
    assert "an earlier call, which was given up after" in manager.last_error["late"]
    assert "took longer than reward.timeout_s=1" in caplog.text
    Hangs.goes_on.set()
    time.sleep(0.5)
    again = manager.collect([manager.submit(random_images(2), numbered_prompts(2, 2))])
    assert again.parts["late"].tolist() == [1.0, 1.0]
    manager.close()


# --- Configuration


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"terms": {"ocr": None}}, r"terms has no reward, and needs one"),
        ({"terms": {"jpeg": {"weight": 0.0}}}, r"terms has jpeg, and needs one of another weight"),
        ({"terms": {"ocr": 1.0}}, r"terms\.ocr=1\.0 must be a mapping"),
        ({"terms": {"ocr": {"weight": "big"}}}, r"terms\.ocr\.weight='big' must be a finite"),
        ({"terms": {"ocr": {"weight": math.nan}}}, r"terms\.ocr\.weight=nan must be a finite"),
        ({"terms": {"ocr": {"wieght": 1}}}, r"terms\.ocr\.wieght: unknown option"),
        ({"terms": {"ocr": {"detection": "no"}}}, r"terms\.ocr: detection='no': allowed are"),
        ({"terms": {"orc": {}}}, r"terms\.orc: .* no plug-in 'orc' \(did you mean 'ocr'"),
        ({"max_failed_fraction": 1.5}, r"max_failed_fraction=1\.5: give a number from 0 to 1"),
        ({"timeout_s": 0}, r"timeout_s=0: give a number of at least 0\.001"),
    ],
)
def test_bad_configurations(config, message):
    with pytest.raises(ValueError, match=rf"reward\.{message}"):
        build_terms(RewardConfig(**config))


def test_which_rewards_need_a_target():
    assert requires_target(build_terms(RewardConfig()))
    assert requires_target(build_terms(RewardConfig(terms={"jpeg": {}, "exact_match": {}})))
    assert not requires_target(build_terms(RewardConfig(terms={"jpeg": {}})))


def test_a_reward_of_weight_zero_is_logged_and_cannot_invalidate_a_sample():
    terms = {
        "a": {"_target_": f"{HERE}.Index"},
        "b": {"_target_": f"{HERE}.Returns", "weight": 0.0, "what": "raise"},
    }
    _, rewards = run(RewardConfig(terms=terms, max_failed_fraction=1.0))
    assert rewards.total.tolist() == rewards.parts["a"].tolist()
    assert rewards.valid.all()
    assert rewards.parts["b"].isnan().any()
