"""RowMetrics: metrics that follow from columns of rows, where rows come in blocks."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from flowgrpo_rc.core.metrics import MetricBag


class RowMetrics:
    """Collects columns, one number of each row, and computes metrics from those of all rows.

    A block of rows only leaves its columns here, so that the metrics are computed once and do not
    depend on where blocks begin.
    """

    def __init__(self) -> None:
        self._functions: dict[str, Callable[..., MetricBag]] = {}
        self._blocks: dict[str, list[Mapping[str, Tensor]]] = {}

    def put(self, topic: str, function: Callable[..., MetricBag], **columns: Tensor) -> None:
        """Takes in the columns of a block of rows.

        Args:
          topic: what the columns are about; every block has the same topics.
          function: computes the metrics of the topic; its arguments are the columns of all rows,
            [B]. That of the last block is called.
          columns: name of the argument -> number of each row of the block, [b].
        """
        self._functions[topic] = function
        self._blocks.setdefault(topic, []).append(columns)

    def bag(self) -> MetricBag:
        """Computes the metrics of all topics from the columns of all blocks."""
        bag = MetricBag()
        for topic, blocks in self._blocks.items():
            columns = blocks[0]
            if len(blocks) > 1:
                columns = {name: torch.cat([block[name] for block in blocks]) for name in columns}
            bag.merge(self._functions[topic](**columns))
        return bag
