"""Rewards that compare a group: whole groups, however samples arrive."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.prompts import numbered_prompts, random_images

from flowgrpo_rc.batch import Rewards
from flowgrpo_rc.cli import main
from flowgrpo_rc.core.metrics import MetricBag
from flowgrpo_rc.rewards.base import Reward, Scores
from flowgrpo_rc.rewards.collect import record_rewards
from flowgrpo_rc.rewards.groups import Groups
from flowgrpo_rc.rewards.manager import RewardConfig, RewardManager

HERE = __name__
SIZE = 4
GROUP = [5] * SIZE + [2] * SIZE + [9] * SIZE
IMAGES = random_images(len(GROUP))
PROMPTS = [numbered_prompts(1, group)[0] for group in GROUP]
MEANS = IMAGES.reshape(len(GROUP), -1).mean(1)


class Rank(Reward):
    """Scores a sample by how many of its group are darker."""

    groupwise = True
    kind = "any"
    part_names = ("group",)

    def __call__(self, samples, prompts):
        assert len({prompt.index for prompt in prompts}) == 1, "one group at a time"
        numbers = [
            len(sample) if isinstance(sample, str) else float(np.asarray(sample, float).mean())
            for sample in samples
        ]
        return Scores(
            values=[float(sum(other < number for other in numbers)) for number in numbers],
            parts={"group": [float(len(numbers))] * len(numbers)},
        )


class LatentRank(Rank):
    kind = "latent"


class Bright(Reward):
    def __call__(self, samples, prompts):
        return Scores(values=[float(sample.mean()) for sample in samples])


def ranks() -> list[float]:
    """Ranks every sample in its group by hand."""
    return [
        float(sum(MEANS[j] < MEANS[i] for j in range(len(GROUP)) if GROUP[i] == GROUP[j]))
        for i in range(len(GROUP))
    ]


def score(
    target: str, chunks: tuple[int, ...], *, grouped: bool = True, **terms: object
) -> Rewards:
    config = RewardConfig(terms={"rank": {"_target_": f"{HERE}.{target}"}, **terms})
    manager = RewardManager(config)
    handles = []
    start = 0
    for count in chunks:
        rows = slice(start, start + count)
        groups = Groups(GROUP[rows], SIZE) if grouped else None
        latents = torch.from_numpy(IMAGES[rows].astype(np.float32))
        handles.append(manager.submit(IMAGES[rows], PROMPTS[rows], latents, groups))
        start += count
    try:
        return manager.collect(handles)
    finally:
        manager.close()


@pytest.mark.parametrize("target", ["Rank", "LatentRank"])
@pytest.mark.parametrize("chunks", [(12,), (3, 3, 6), (1,) * 12])
def test_chunks_do_not_matter(target: str, chunks: tuple[int, ...]) -> None:
    rewards = score(target, chunks, bright={"_target_": f"{HERE}.Bright", "weight": 0.5})
    assert rewards.parts["rank"].tolist() == ranks()
    assert rewards.parts["rank/group"].tolist() == [SIZE] * 12
    assert np.allclose(rewards.parts["bright"], MEANS)
    assert np.allclose(rewards.total, np.array(ranks()) + 0.5 * MEANS)


@pytest.mark.parametrize("chunks", [(3,), (4, 5), (4, 4, 3)])
def test_a_group_that_is_not_whole_is_refused(chunks: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"samples of group \d have arrived.*needs all 4 \(roll"):
        score("Rank", chunks)


def test_a_failure_costs_its_group_alone() -> None:
    prompts = [*PROMPTS[:4], *PROMPTS[4:8], PROMPTS[4], *PROMPTS[9:]]
    manager = RewardManager(RewardConfig(terms={"rank": {"_target_": f"{HERE}.Rank"}}))
    rewards = manager.collect([manager.submit(IMAGES, prompts, None, Groups(GROUP, SIZE))])
    manager.close()
    assert rewards.valid.tolist() == [True] * 8 + [False] * 4
    assert "one group at a time" in manager.last_error["rank"]


def test_held_out_samples_are_no_groups() -> None:
    both = score("Rank", (12,), grouped=False, bright={"_target_": f"{HERE}.Bright"})
    assert list(both.parts) == ["bright"]
    assert np.allclose(both.total, MEANS)
    terms = {"rank": {"_target_": f"{HERE}.Rank"}, "bright": {"_target_": f"{HERE}.Bright"}}
    manager = RewardManager(RewardConfig(terms=terms))
    manager.close()
    # A process without samples has the same names.
    assert manager.part_keys(grouped=True) == ["rank", "rank/group", "bright"]
    assert manager.part_keys(grouped=False) == [*manager.count_failed(both)] == ["bright"]
    weightless = {"_target_": f"{HERE}.Bright", "weight": 0}
    for terms, left in (({"bright": weightless}, {"val/bright": MEANS.mean()}), ({}, {})):
        rewards = score("Rank", (7, 5), grouped=False, **terms)
        metrics = MetricBag()
        record_rewards(metrics, rewards, prefix="val", total="reward")
        assert metrics.compute() == pytest.approx({"val/failed_fraction": 0.0} | left)


def test_it_is_not_served(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("REWARD_TOKEN", "abc")
    assert main(["serve-reward", f"{HERE}.Rank", "--token-env", "REWARD_TOKEN"]) == 2
    assert "compares whole groups, and a request holds a few" in capsys.readouterr().err


def test_texts_are_groups_too() -> None:
    manager = RewardManager(RewardConfig(terms={"rank": {"_target_": f"{HERE}.Rank"}}))
    texts = ["a", "bb", "ccc", "d"]
    prompts = [PROMPTS[0], PROMPTS[0], PROMPTS[4], PROMPTS[4]]
    handles = [
        manager.submit(texts[rows], prompts[rows], None, Groups([0, 0, 1, 1][rows], 2))
        for rows in (slice(0, 1), slice(1, 3), slice(3, 4))
    ]
    assert manager.collect(handles).parts["rank"].tolist() == [0, 1, 1, 0]
    manager.close()
