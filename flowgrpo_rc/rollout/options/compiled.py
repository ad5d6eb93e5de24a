"""torch.compile for the repeated blocks of the network that samples."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, fx, nn

from flowgrpo_rc.models.quantization import repeated_blocks
from flowgrpo_rc.rollout.options.option import RolloutOption, SamplingNetwork

logger = logging.getLogger(__name__)

Forward = Callable[..., object]
Backend = Callable[[fx.GraphModule, list[Tensor]], Forward]

_failed: list[str] = []  # the kinds of errors that inductor ended with


@dataclass(frozen=True)
class Compiled(RolloutOption):
    """Compiles each kind of block when it is first called.

    backend: what compiles a graph, in torch's own form.
    """

    backend: Backend | None = None
    shares_weights = False

    @property
    def setting(self) -> str:
        """Returns the setting that chose it."""
        return "rollout.compile=true"

    def wrap(self, copy: SamplingNetwork) -> None:
        """Has the blocks of the copy compiled."""
        compile_blocks(copy.network, self.backend or inductor_or_eager)


def inductor_or_eager(graph: fx.GraphModule, inputs: list[Tensor]) -> Forward:
    """Compiles a graph with torch's inductor; one that it cannot compile runs as it is."""
    from torch._dynamo import exc, lookup_backend  # it takes a second to import

    try:
        compiled: Forward = lookup_backend("inductor")(graph, inputs)
    except (exc.RestartAnalysis, exc.SkipFrame):  # inductor asks for another graph
        raise
    except Exception as error:
        if not _failed:
            first_line = str(error).partition("\n")[0]
            logger.warning("rollout.compile: a block runs without it (%s)", first_line)
        _failed.append(type(error).__name__)
        return graph.forward
    return compiled


def compile_blocks(network: nn.Module, backend: Backend) -> None:
    """Has each kind of a network's blocks compiled when it is first called.

    Sizes are symbols from the start. So other numbers of rows or tokens need no further code, but
    for a single row, and results do not depend on the sizes that came first.
    """
    for block in repeated_blocks(network):
        block.compile(backend=backend, dynamic=True)
