"""The best held-out reward of a run so far. It follows from the rows of metrics.jsonl."""

from collections.abc import Mapping, Sequence

from flowgrpo_rc.records.metrics_file import Row


class BestEvaluation:
    """Which evaluation had the highest held-out reward, and how many came after it.

    Attributes:
      step: of that evaluation, the first of equals; None before one with a finite reward.
    """

    def __init__(self, rows: Sequence[Row] = ()) -> None:
        """Takes the rows of a run in their order; without evaluations they change nothing."""
        self.step: int | None = None
        self.reward = float("-inf")
        self.worse = 0  # evaluations since then
        for row in rows:
            self.see(row["step"], row)

    def see(self, step: int, row: Mapping[str, float | None]) -> bool:
        """Returns whether the row of a step has a better held-out reward than all before."""
        if "val/reward" not in row:
            return False
        reward = row["val/reward"]
        if reward is None or not reward > self.reward:  # no number is above NaN
            self.worse += 1
            return False
        self.step = step
        self.reward = reward
        self.worse = 0
        return True

    def over(self, patience: int | None) -> bool:
        """Returns whether so many evaluations in a row were no better; None waits forever."""
        return patience is not None and self.worse >= patience
