"""Observations of the newest iterations, which bands and clips of `auto:k` follow.

Legend: N observations of an iteration, S steps of the schedule.
"""

from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

# Observations of a step before something follows them. The deviation is then known to about 15%.
WARM_UP = 64
# The newest 8 iterations are held, or as many more as it takes to hold 4096 observations.
MEMORY = (8, 4096)
# The standard deviation of a normal distribution, divided by its median absolute deviation.
ROBUST = 1.4826

Gather = Callable[[Tensor], Tensor]


class Iteration(NamedTuple):
    """The observations of one iteration."""

    steps: Tensor  # of the schedule, that each belongs to, int64, [N]
    values: Tensor  # float64, [N]; nan where there was none


class History:
    """The observations of one quantity over the newest iterations, the same on all processes."""

    def __init__(self, device: torch.device) -> None:
        """Starts without observations, which are kept on a device."""
        self._none = torch.zeros(0, dtype=torch.float64, device=device)
        self._seen: list[Iteration] = []
        self._past: deque[Iteration] = deque()

    def add(self, steps: Tensor, values: Tensor) -> None:
        """Notes observations of this process in this iteration, float64 [b, t], nan for none.

        `steps`, int64 [b, t], are those of the schedule that they belong to.
        """
        # References: a tensor that is noted is not copied, and must not change any more.
        self._seen.append(Iteration(steps.flatten(), values.flatten()))

    def finish(self, gather: Gather) -> None:
        """Ends an iteration: takes in the rows of all processes, and forgets what is too old."""
        newest, enough = MEMORY
        # Every process holds the rows of all, so their bands agree without a further exchange.
        steps = gather(torch.cat([seen.steps for seen in self._seen]))
        values = gather(torch.cat([seen.values for seen in self._seen]))
        self._past.append(Iteration(steps, values))
        held = sum(len(iteration.values) for iteration in self._past)
        while len(self._past) > newest and held - len(self._past[0].values) >= enough:
            held -= len(self._past.popleft().values)
        self._seen = []

    def of_step(self, step: int) -> Tensor:
        """Returns a value for every observation held, float64, [N + 1].

        It is nan for an observation of another step, and the last one always is: `nanquantile`
        needs an element.
        """
        values = [torch.where(past.steps == step, past.values, torch.nan) for past in self._past]
        return torch.cat([*values, self._none.new_full((1,), torch.nan)])

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Returns the observations for a checkpoint, under names that begin with `name`."""
        sizes = [len(iteration.values) for iteration in self._past]
        return {
            f"{name}.sizes": torch.tensor(sizes, dtype=torch.int64),
            f"{name}.steps": torch.cat([*(past.steps for past in self._past), self._none.long()]),
            f"{name}.values": torch.cat([*(past.values for past in self._past), self._none]),
        }

    def load(self, tensors: Mapping[str, Tensor], name: str) -> None:
        """Goes back to the observations that `tensors` recorded."""
        device = self._none.device
        sizes = tensors[f"{name}.sizes"].tolist()
        steps = tensors[f"{name}.steps"].to(device).split(sizes)
        values = tensors[f"{name}.values"].to(device).split(sizes)
        self._past = deque(map(Iteration, steps, values))
