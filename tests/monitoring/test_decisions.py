"""The worst rejected samples of a step."""

from __future__ import annotations

import math

import numpy as np
import torch
from support.decisions import normal, observation

from flowgrpo_rc.monitoring.decisions import worst_rejected


def test_the_worst_rejected_samples_come_first_and_once() -> None:
    difference = normal(20, 4)
    kept = torch.rand(20, 4, generator=torch.Generator().manual_seed(3)) > 0.3
    difference[7, 2] = math.nan
    kept[7, 2] = False
    kept[3] = True
    difference[3, 0] = 1.0  # large, but kept
    # One step at a time, as bypass mode has it.
    seen = [
        observation(difference[:, t : t + 1], kept[:, t : t + 1], cells=torch.full((20, 1), t))
        for t in range(4)
    ]
    sizes = np.where(kept.numpy(), -1.0, difference.abs().nan_to_num(nan=math.inf).numpy())
    order = [row for row in np.argsort(-sizes.max(1)) if sizes[row].max() >= 0]
    found = worst_rejected(seen, 5)
    assert [int(one.seed[row]) for one, row in found] == order[:5]
    assert [int(one.cells[row, 0]) for one, row in found] == sizes.argmax(1)[order[:5]].tolist()
    assert worst_rejected([observation(normal(4, 2))], 3) == []
    assert worst_rejected([], 3) == []
