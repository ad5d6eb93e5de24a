"""A loss and a reward that say how often they were made."""

from __future__ import annotations

from collections import Counter

from support.prompts import brightness

from flowgrpo_rc.losses.flow_grpo import FlowGRPO
from flowgrpo_rc.rewards.function import Function

MADE: Counter[str] = Counter()


class CountedLoss(FlowGRPO):
    """Says that it was made."""

    def __post_init__(self) -> None:
        MADE["loss"] += 1


class CountedReward(Function):
    """Says that it was made."""

    def __init__(self) -> None:
        MADE["reward"] += 1
        super().__init__(path=f"{brightness.__module__}:{brightness.__name__}")
