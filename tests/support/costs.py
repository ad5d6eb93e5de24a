"""What a call costs: forwards of the policy, and transfers from the device to the host."""

from __future__ import annotations

from collections.abc import Callable

from benchmark_correction import cost

from flowgrpo_rc.batch import DiffusionBatch
from flowgrpo_rc.policies.base import Evaluation
from flowgrpo_rc.policies.flow import FlowPolicy


class Counting(FlowPolicy):
    forwards = 0

    def evaluate(self, batch: DiffusionBatch) -> Evaluation:
        self.forwards += 1
        return super().evaluate(batch)


def transfers(call: Callable[[], object]) -> int:
    return cost(call).transfers
