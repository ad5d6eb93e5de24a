"""Sampling with older weights, so that workers can sample steps to come while this one trains."""

from collections.abc import Callable, Mapping

from torch import Tensor

from flowgrpo_rc.training.sources.engine import EngineSource
from flowgrpo_rc.training.sources.source import Collected, RolloutSource, sampled_version


class AheadSource(RolloutSource):
    """Samples step s with the weights of step max(0, s - 1 - staleness), never with others.

    So the weights of a sample do not depend on which side is faster: runs repeat and resume bit for
    bit. An engine that samples elsewhere is asked for a step as soon as its weights are handed
    over, up to `staleness` steps ahead of the training. Another one samples it when it is its turn.
    """

    def __init__(self, source: EngineSource, staleness: int, *, steps: range) -> None:
        """Asks for nothing yet. Weights may be `staleness` steps behind, at least 1."""
        self._source = source
        self._staleness = staleness
        self._steps = steps
        self._asked: dict[int, Callable[[], Collected]] = {}
        self._versions: dict[int, dict[str, Tensor]] = {}

    def collect(self, step: int) -> Collected:
        """Waits for the samples of a step. EngineError if the engine used other weights."""
        receive = self._asked.pop(step, None) or self._ask(step)
        collected = receive()
        collected.check_versions(step, self._staleness)
        return collected

    def sync_weights(self, state: Mapping[str, Tensor], version: int) -> None:
        """Copies the LoRA after `version` steps, and asks for the steps that have waited for it."""
        oldest = version - self._staleness
        self._versions = {v: past for v, past in self._versions.items() if v >= oldest}
        self._versions[version] = {name: tensor.detach().clone() for name, tensor in state.items()}
        if not self._source.engine.elsewhere:
            return
        for step in range(version + 1, version + self._staleness + 2):
            if step in self._steps and sampled_version(step, self._staleness) == version:
                self._asked[step] = self._ask(step)

    def older_weights(self) -> dict[int, Mapping[str, Tensor]]:
        """Returns the weights that steps still to be sampled need, without the newest."""
        newest = max(self._versions)
        return {version: state for version, state in self._versions.items() if version != newest}

    def close(self) -> None:
        """Closes the engine."""
        self._source.close()

    def _ask(self, step: int) -> Callable[[], Collected]:
        version = sampled_version(step, self._staleness)
        self._source.sync_weights(self._versions[version], version)
        return self._source.ask(self._source.prompts(step))
