"""torch.compile for the repeated blocks of a sampling network."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx, nn

from flowgrpo_rc.models.quantization import repeated_blocks

logger = logging.getLogger(__name__)

Compiled = Callable[..., Any]


class InductorOrEager:
    """Compiles graphs with torch's inductor; those that it cannot compile run as they are.

    Attributes:
      failed: whether there was such a graph. The first one is told.
    """

    def __init__(self) -> None:
        self.failed = False

    def __call__(self, graph: fx.GraphModule, inputs: Sequence[Tensor]) -> Compiled:
        """Returns what computes a graph, as torch asks a backend for."""
        from torch._dynamo import lookup_backend  # it takes a second to import

        try:
            compiled: Compiled = lookup_backend("inductor")(graph, inputs)
        except Exception as error:
            # A rollout is worth more than its speed.
            if not self.failed:
                logger.warning("rollout.compile: a block runs without it (%s)", _told(error))
            self.failed = True
            return graph.forward
        return compiled


# One for all networks: torch takes code over only from one with the same backend.
INDUCTOR = InductorOrEager()


def compile_blocks(network: nn.Module, backend: Any = INDUCTOR) -> None:
    """Has the blocks of a network compiled when they are first called, each kind of them once.

    Sizes are symbols from the start. So other numbers of rows or tokens need no further code, but
    for a single row, and results do not depend on the sizes that came first.
    """
    for block in repeated_blocks(network):
        block.compile(backend=backend, dynamic=True)


def _told(error: Exception) -> str:
    """Returns the first line of an error."""
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}"
