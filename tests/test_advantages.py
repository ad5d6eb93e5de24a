"""Group-relative advantages against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from oracles import mean, on_shards, std
from torch import Tensor

from flowgrpo_rc.core.advantages import group_relative

EPS = 1e-4


def tensors(rewards: list[float], group: list[int], valid: list[bool] | None = None) -> tuple[Tensor, Tensor, Tensor]:
    holds = [True] * len(rewards) if valid is None else valid
    return torch.tensor(rewards, dtype=torch.float64), torch.tensor(group), torch.tensor(holds)


def oracle(rewards: list[float], group: list[int], valid: list[bool], *, by_std: bool, global_std: bool) -> list[float]:
    everything = [reward for reward, ok in zip(rewards, valid, strict=True) if ok]
    result = []
    for reward, own, ok in zip(rewards, group, valid, strict=True):
        peers = [r for r, g, v in zip(rewards, group, valid, strict=True) if g == own and v]
        if not ok or len(set(peers)) < 2:
            result.append(0.0)
            continue
        scale = (std(everything if global_std else peers) + EPS) if by_std else 1.0
        result.append((reward - mean(peers)) / scale)
    return result


def test_by_hand():
    """Groups (0, 1) and (2, 4, 6): means 0.5 and 4, standard deviations 0.5 and sqrt(8/3)."""
    found = group_relative(*tensors([0, 1, 2, 4, 6], [7, 7, 3, 3, 3]))
    own, other = 0.5 / (0.5 + EPS), 2 / (math.sqrt(8 / 3) + EPS)
    assert found.values.tolist() == pytest.approx([-own, own, -other, 0, other], abs=1e-15)
    assert found.values.dtype == torch.float64
    assert found.zero_std.tolist() == [False, False]


def test_dr_grpo_by_hand():
    found = group_relative(*tensors([0, 1, 2, 4, 6], [7, 7, 3, 3, 3]), norm_by_std=False)
    assert found.values.tolist() == [-0.5, 0.5, -2, 0, 2]


def test_global_std_by_hand():
    """All rewards (0, 1, 2, 4, 6): mean 2.6, variance 4.64; the baseline stays that of the group."""
    found = group_relative(*tensors([0, 1, 2, 4, 6], [7, 7, 3, 3, 3]), global_std=True)
    scale = math.sqrt(4.64) + EPS
    assert found.values.tolist() == pytest.approx([x / scale for x in (-0.5, 0.5, -2, 0, 2)], abs=1e-14)


@pytest.mark.parametrize("by_std", [True, False])
@pytest.mark.parametrize("global_std", [True, False])
@pytest.mark.parametrize("failed", [(), (1,), (0, 5, 6), (4, 5, 6, 7)])
def test_random_groups_interleaved_and_with_failed_rewards(by_std, global_std, failed):
    source = torch.Generator().manual_seed(len(failed))
    rewards = torch.rand(12, generator=source, dtype=torch.float64).tolist()
    group = [5, -2, 5, 9, 9, 9, 9, 9, -2, 5, -2, 5]
    valid = [index not in failed for index in range(12)]
    found = group_relative(*tensors(rewards, group, valid), norm_by_std=by_std, global_std=global_std)
    expect = oracle(rewards, group, valid, by_std=by_std, global_std=global_std)
    assert found.values.tolist() == pytest.approx(expect, abs=1e-13)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e300])
@pytest.mark.parametrize("options", [{}, {"global_std": True}, {"norm_by_std": False}])
def test_an_invalid_sample_gets_zero_and_leaves_the_baseline(bad, options):
    valid = [True, True, False, True, True]
    found = group_relative(*tensors([0, 1, bad, 4, 6], [0, 0, 0, 1, 1], valid), **options)
    without = group_relative(*tensors([0, 1, 4, 6], [0, 0, 1, 1]), **options)
    assert found.values[2] == 0
    assert found.values[valid].tolist() == without.values.tolist()


@pytest.mark.parametrize("value", [0.1, 1 / 3, 0.7, 1e-9, 123456.789])
@pytest.mark.parametrize("options", [{}, {"global_std": True}, {"norm_by_std": False}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_give_exactly_zero_whatever_their_mean_rounds_to(value, options, dtype):
    rewards, group, valid = tensors([value] * 7 + [0.0, 1.0], [0] * 7 + [1] * 2)
    found = group_relative(rewards.to(dtype), group, valid, **options)
    assert found.values[:7].tolist() == [0.0] * 7
    assert found.values[7:].abs().min() > 0
    assert found.zero_std.tolist() == [True, False]


@pytest.mark.parametrize("options", [{}, {"global_std": True}, {"norm_by_std": False}])
def test_a_group_without_valid_samples_and_a_group_of_one(options):
    found = group_relative(*tensors([1, 2, 5, 3, 9], [0, 0, 1, 2, 2], [False, False, True, True, True]), **options)
    assert torch.isfinite(found.values).all()
    assert found.values[:3].tolist() == [0, 0, 0]
    assert found.values[3] == -found.values[4] != 0


@pytest.mark.parametrize("options", [{}, {"global_std": True}, {"norm_by_std": False}])
def test_nothing_valid_gives_zeros(options):
    found = group_relative(*tensors([1, math.nan], [0, 1], [False, False]), **options)
    assert found.values.tolist() == [0, 0]


def test_a_shift_of_the_rewards_changes_nothing():
    rewards, group, valid = tensors([0, 1, 2, 4, 6], [7, 7, 3, 3, 3])
    before, after = (group_relative(r, group, valid).values for r in (rewards, rewards + 8))
    torch.testing.assert_close(before, after, rtol=1e-12, atol=0)


@pytest.mark.parametrize("by_std", [True, False])
@pytest.mark.parametrize("global_std", [True, False])
def test_processes_share_the_global_statistics_and_nothing_else(by_std, global_std):
    rewards, group, valid = tensors(
        [0.1, 0.9, 0.3, 0.3, 5.0, 7.5, 1.0, 2.0], [0, 0, 1, 1, 2, 2, 3, 3], [True] * 6 + [False, True]
    )
    whole = group_relative(rewards, group, valid, norm_by_std=by_std, global_std=global_std)
    halves = [slice(0, 2), slice(2, 8)]

    def work(rank, reduce):
        part = halves[rank]
        options = {"norm_by_std": by_std, "global_std": global_std, "all_reduce": reduce["sum"]}
        return group_relative(rewards[part], group[part], valid[part], **options).values

    torch.testing.assert_close(torch.cat(on_shards(2, work)), whole.values, rtol=0, atol=1e-12)
