"""Moving weights by one unit in the last place."""

from __future__ import annotations

import torch

from flowgrpo_rc.policies.base import nudge


def test_a_nudge_is_one_unit_in_the_last_place() -> None:
    values = torch.randn(64, 33, generator=torch.Generator().manual_seed(0)).bfloat16()
    values[0] = 0
    moved = nudge(values.float(), torch.bfloat16)
    assert moved.dtype == torch.bfloat16
    assert torch.equal(moved, nudge(values, torch.bfloat16))
    assert (moved[0] == 0).all()
    steps = (moved.view(torch.int16) - values.view(torch.int16))[1:]
    assert set(steps.unique().tolist()) <= {-1, 0, 1}
    assert (steps != 0).double().mean() > 0.98  # a half of those at powers of 2 stay
    assert steps.double().mean().abs() < 0.1
