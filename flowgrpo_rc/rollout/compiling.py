"""torch.compile for the repeated blocks of a sampling network."""

import logging
from collections.abc import Callable
from typing import Any

from torch import Tensor, fx, nn

from flowgrpo_rc.models.quantization import repeated_blocks

logger = logging.getLogger(__name__)

_failed: list[str] = []  # the kinds of errors that inductor ended with


def inductor_or_eager(graph: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    """Compiles a graph with torch's inductor; one that it cannot compile runs as it is."""
    from torch._dynamo import exc, lookup_backend  # it takes a second to import

    try:
        return lookup_backend("inductor")(graph, inputs)
    except (exc.RestartAnalysis, exc.SkipFrame):  # inductor asks for another graph
        raise
    except Exception as error:
        if not _failed:
            first_line = str(error).partition("\n")[0]
            logger.warning("rollout.compile: a block runs without it (%s)", first_line)
        _failed.append(type(error).__name__)
        return graph.forward


def compile_blocks(network: nn.Module, backend: Any) -> None:
    """Has each kind of a network's blocks compiled when it is first called.

    Sizes are symbols from the start. So other numbers of rows or tokens need no further code, but
    for a single row, and results do not depend on the sizes that came first.
    """
    for block in repeated_blocks(network):
        block.compile(backend=backend, dynamic=True)
