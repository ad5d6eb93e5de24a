"""Masked sums and means."""

import math

import pytest
import torch

from flowgrpo_rc.core.reduce import masked_mean


def test_masked_reductions():
    values = torch.tensor([[1.0, math.nan], [math.inf, 4.0], [math.nan, math.nan]])
    mask = torch.tensor([[True, False], [False, True], [False, False]])
    assert masked_mean(values, mask).item() == 2.5
    assert masked_mean(values, mask, 1).tolist() == [1, 4, 0]
    doubled = masked_mean(values, mask, all_reduce=lambda total: total + torch.tensor([5.0, 1.0]))
    assert doubled.item() == pytest.approx(10 / 3)
