"""Group-relative advantages against numbers worked out by hand."""

import math

import pytest
import torch
from support.builders import diffusion_batch, on_shards, token_batch
from support.oracles import mean, std
from torch import Tensor

from flowgrpo_rc.core.advantages import (
    ESTIMATORS,
    advantage_metrics,
    estimate,
    farthest,
    group_decoupled,
    group_relative,
)

EPS = 1e-4
OPTIONS = [
    {},
    {"global_std": True},
    {"norm_by_std": False},
    {"norm_by_std": False, "leave_one_out": True},
]


def tensors(
    rewards: list[float], group: list[int], valid: list[bool] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    holds = [True] * len(rewards) if valid is None else valid
    return torch.tensor(rewards, dtype=torch.float64), torch.tensor(group), torch.tensor(holds)


def oracle(
    rewards: list[float],
    group: list[int],
    valid: list[bool],
    *,
    norm_by_std: bool = True,
    global_std: bool = False,
    leave_one_out: bool = False,
) -> list[float]:
    """Computes the advantages in loops."""
    everything = [reward for reward, ok in zip(rewards, valid, strict=True) if ok]
    result = []
    for reward, own, ok in zip(rewards, group, valid, strict=True):
        peers = [r for r, g, v in zip(rewards, group, valid, strict=True) if g == own and v]
        if not ok or len(set(peers)) < 2:
            result.append(0.0)
            continue
        baseline = (sum(peers) - reward) / (len(peers) - 1) if leave_one_out else mean(peers)
        scale = (std(everything if global_std else peers) + EPS) if norm_by_std else 1.0
        result.append((reward - baseline) / scale)
    return result


@pytest.mark.parametrize("options", [*OPTIONS, {"norm_by_std": False, "global_std": True}])
@pytest.mark.parametrize(
    "failed", [(), (1,), (0, 5, 6), (4, 5, 6, 7), (0, 2, 9), (1, 8), (1, 8, 10), range(12)]
)
def test_groups_interleaved_and_with_failed_rewards(options, failed):
    """A group may be left with one valid sample, which gets 0, or with none."""
    source = torch.Generator().manual_seed(7)
    rewards = torch.rand(12, generator=source, dtype=torch.float64).tolist()
    group = [5, -2, 5, 9, 9, 9, 9, 9, -2, 5, -2, 5]
    valid = [index not in failed for index in range(12)]
    actual = group_relative(*tensors(rewards, group, valid), **options)
    expect = oracle(rewards, group, valid, **options)
    assert actual.values.tolist() == pytest.approx(expect, abs=1e-13)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e300])
@pytest.mark.parametrize("options", OPTIONS)
def test_an_invalid_sample_gets_zero_and_leaves_the_baseline(bad, options):
    valid = [True, True, False, True, True]
    actual = group_relative(*tensors([0, 1, bad, 4, 6], [0, 0, 0, 1, 1], valid), **options)
    without = group_relative(*tensors([0, 1, 4, 6], [0, 0, 1, 1]), **options)
    assert actual.values[2] == 0
    assert actual.values[valid].tolist() == without.values.tolist()


@pytest.mark.parametrize("value", [0.1, 1 / 3, 0.7, 1e-9, 123456.789])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_give_exactly_zero_whatever_their_mean_rounds_to(value, options, dtype):
    rewards, group, valid = tensors([value] * 7 + [0.0, 1.0], [0] * 7 + [1] * 2)
    actual = group_relative(rewards.to(dtype), group, valid, **options)
    assert actual.values[:7].tolist() == [0.0] * 7
    assert actual.values[7:].abs().min() > 0
    assert actual.zero_std.tolist() == [True, False]


@pytest.mark.parametrize("options", OPTIONS)
def test_processes_share_the_global_statistics_and_nothing_else(options):
    rewards = [0.1, 0.9, 0.3, 0.3, 5.0, 7.5, 1.0, 2.0]
    columns = tensors(rewards, [0, 0, 1, 1, 2, 2, 3, 3], [True] * 6 + [False, True])
    halves = [slice(0, 2), slice(2, 8)]

    def work(rank, reduce):
        part = [column[halves[rank]] for column in columns]
        return group_relative(*part, all_reduce=reduce["sum"], **options).values

    whole = group_relative(*columns, **options).values
    torch.testing.assert_close(torch.cat(on_shards(2, work)), whole, rtol=0, atol=1e-12)


def test_a_sample_is_wholly_rejected_if_it_has_steps_and_keeps_none():
    mask = torch.tensor([[1, 1, 0], [1, 1, 0], [0, 0, 0], [1, 1, 1]], dtype=torch.bool)
    kept = torch.tensor([[0, 0, 1], [0, 1, 1], [0, 0, 0], [0, 0, 0]], dtype=torch.bool)
    zero = torch.zeros(4, 3)
    text = token_batch(zero, mask, rejection_mask=kept)
    assert text.wholly_rejected().tolist() == [True, False, False, True]
    images = diffusion_batch(zero, rejection_mask=kept)
    assert images.wholly_rejected().tolist() == [False, False, True, True]
    assert text.replace(rejection_mask=None).wholly_rejected().tolist() == [False] * 4


def by_estimator(name: str, group_size: int, *terms: Tensor) -> Tensor:
    group = torch.arange(len(terms[0])) // group_size
    valid = torch.ones(len(group)).bool()
    norm_by_std, global_std = ESTIMATORS[name]
    options = {"norm_by_std": norm_by_std, "global_std": global_std}
    return estimate(name, sum(terms), terms, [1.0] * len(terms), group, valid, **options).values


@pytest.mark.parametrize("value", [0.83, -0.83, 1 / 3, 1e-6, 4097.0])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_rewards_that_differ_by_the_rounding_of_fp32_teach_nothing(name, value):
    """Neither alone nor beside a reward that differs, whatever their unit."""
    eps = torch.finfo(torch.float32).eps
    rounded = torch.tensor(value) * (1 + eps * torch.tensor([0.0, 1.0, 2.0] * 4))
    assert rounded.unique().numel() == 3
    assert by_estimator(name, 3, rounded).tolist() == [0.0] * 12
    real = torch.tensor([0.0, 1.0, 0.0] * 4)
    both, alone = by_estimator(name, 3, rounded, real), by_estimator(name, 3, real)
    torch.testing.assert_close(both, alone, atol=3e-3, rtol=0)


@pytest.mark.parametrize("unit", [1e-6, 1.0, 1e5])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_real_difference_counts_in_every_unit(name, unit):
    """Also one in ten thousand; GDPO knows no unit."""
    rewards = unit * torch.tensor([1.0, 1.0001] * 4)
    assert by_estimator(name, 2, rewards).abs().min() > 0
    assert name != "gdpo" or by_estimator(name, 2, 1e4 * rewards).abs().min() > 0.4


# --- GDPO


def gdpo_oracle(
    rewards: list[list[float]], weights: list[float], group: list[int], valid: list[bool]
) -> list[float]:
    """Divides each reward by the deviation of its group, and the weighted sum by that of the
    batch.
    """
    alone = [oracle(reward, group, valid) for reward in rewards]
    summed = [
        sum(w * part[i] for w, part in zip(weights, alone, strict=True)) for i in range(len(group))
    ]
    scale = std([value for value, ok in zip(summed, valid, strict=True) if ok]) + EPS
    return [value / scale for value in summed]


GDPO = {
    "rewards": [[0.0, 1.0, 0.0, 2.0, 2.0, 2.0, 9.0], [50.0, 10.0, 30.0, 30.0, 10.0, 20.0, 0.0]],
    "weights": [1.0, -0.5],
    "group": [4, 4, 4, 9, 9, 9, 9],
    "valid": [True] * 6 + [False],
}


def test_gdpo():
    rewards = [torch.tensor(reward, dtype=torch.float64) for reward in GDPO["rewards"]]
    group, valid = torch.tensor(GDPO["group"]), torch.tensor(GDPO["valid"])
    weights = GDPO["weights"]
    actual = group_decoupled([*zip(weights, rewards, strict=True)], group, valid)
    assert actual.values.tolist() == pytest.approx(gdpo_oracle(**GDPO), abs=1e-12)
    assert actual.values[:6].square().mean().sqrt().item() == pytest.approx(1, abs=1e-3)
    assert actual.zero_std.tolist() == [False, False]
    rows = [slice(0, 3), slice(3, 7)]

    def work(rank, reduce):
        part = rows[rank]
        weighted = [*zip(weights, (reward[part] for reward in rewards), strict=True)]
        columns = (weighted, group[part], valid[part])
        return group_decoupled(*columns, all_reduce=reduce["sum"]).values

    torch.testing.assert_close(torch.cat(on_shards(2, work)), actual.values, rtol=0, atol=1e-12)


def test_the_farthest_of_groups_that_are_mixed():
    generator = torch.Generator().manual_seed(3)
    advantages = torch.randn(60, generator=generator).mul(2).round()  # with many equal ones
    group = torch.randint(7, (60,), generator=generator)
    by_group = {number: [row for row in range(60) if group[row] == number] for number in range(7)}
    expected = [
        row
        for rows in by_group.values()
        for row in sorted(rows, key=lambda row: -abs(float(advantages[row])))[:3]
    ]
    assert farthest(advantages, group, 3).tolist() == sorted(expected)


@pytest.mark.parametrize("kind", ["images", "texts"])
def test_what_leaves_a_group_without_advantages(kind: str) -> None:
    """Four groups of two: all is well, a reward is missing, samples are equal, rewards are."""
    ends = torch.tensor([1, 2, 3, 4, 5, 5, 6, 7])
    if kind == "images":
        latents = torch.zeros(8, 3, 2)
        latents[:, -1, 1] = ends.float()
        batch = diffusion_batch(torch.zeros(8, 2)).replace(all_latents=latents)
    else:
        mask = torch.tensor([[True, False]] * 8)
        padding = torch.arange(8)
        ids = torch.stack([ends, padding], 1)
        batch = token_batch(torch.zeros(8, 2), mask).replace(response_ids=ids)
    rewards = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 5.0, 6.0, 6.0])
    valid = torch.arange(8) != 2
    actual = group_relative(rewards, batch.group, valid)
    metrics = advantage_metrics(actual, valid, batch.group, batch.ends)
    row = metrics.compute()
    assert row["zero_std_ratio"] == 3 / 4
    assert row["advantages/single_ratio"] == row["advantages/identical_ratio"] == 1 / 4
