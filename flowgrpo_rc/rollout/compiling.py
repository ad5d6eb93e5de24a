"""torch.compile for the repeated blocks of a sampling network, and whether it repays."""

import logging
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from torch import Tensor, fx, nn

from flowgrpo_rc.models.quantization import repeated_blocks
from flowgrpo_rc.rollout.engine import ImageRequest, RolloutEngine

logger = logging.getLogger(__name__)

# What decides whether to try: the seconds that compiling is likely to take, if torch's cache on
# disk has graphs or not, and the share of a rollout that it saves.
WARM_S, COLD_S = 5.0, 30.0
LIKELY_SAVING = 0.2


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


def repays(
    make_engine: Callable[[bool], RolloutEngine[Any]], chunk: ImageRequest, num_chunks: int
) -> tuple[bool, str]:
    """Tries compiled blocks on one of the chunks to come, if that may repay; says why, too."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    _, eager = _seconds(make_engine(False), chunk)
    expected = WARM_S if Path(cache_dir(), "fxgraph").is_dir() else COLD_S
    given = f"{num_chunks} chunks of {eager:.2g} s are to come"
    if eager * num_chunks * LIKELY_SAVING < expected:
        return False, f"{given}, and compiling takes about {expected:.0f} s"
    failed = len(_failed)
    first, compiled = _seconds(make_engine(True), chunk)
    given += f"; compiled, the first takes {first:.0f} s, others {compiled:.2g} s"
    return compiled < eager and len(_failed) == failed, given


def _seconds(engine: RolloutEngine[Any], chunk: ImageRequest) -> tuple[float, float]:
    """Returns how long an engine takes for its first chunk and for others, and closes it."""
    found = []
    with closing(engine):
        for _ in range(3):
            start = time.perf_counter()
            for made in engine.generate(chunk):
                made.batch.group.cpu()  # waits for the device
            found.append(time.perf_counter() - start)
    return found[0], min(found[1:])
