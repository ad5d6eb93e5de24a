"""Steps that reuse what a transformer's middle blocks added at an earlier step."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import nn

from flowgrpo_rc.batch import SamplerSpec
from flowgrpo_rc.models.block_cache import BlockCache, middle_blocks, saved_share
from flowgrpo_rc.models.networks import transformers
from flowgrpo_rc.rollout.options.option import RolloutOption, SamplingNetwork


@dataclass(frozen=True)
class CachedBlocks(RolloutOption):
    """Skips the middle blocks on some evaluations of a sample (`models.block_cache`).

    steps: those evaluations.
    recorded: whether some of them are trained.
    """

    every: int
    steps: tuple[int, ...] = ()
    recorded: bool = False

    @property
    def setting(self) -> str:
        """Returns the setting that chose it."""
        return f"rollout.cache.every={self.every}"

    def rounding_explains(self, training_dtype: str) -> bool:
        """Returns whether the recorded steps evaluate all blocks."""
        return not self.recorded

    def spec(self, spec: SamplerSpec) -> SamplerSpec:
        """Returns the settings with the steps to skip at."""
        return replace(spec, cached_steps=self.steps)

    def wrap(self, copy: SamplingNetwork) -> None:
        """Wraps the middle blocks of the copy."""
        copy.cache = BlockCache(copy.network)

    def check_network(self, network: nn.Module) -> None:
        """Raises ValueError if a transformer has no middle blocks."""
        for transformer in transformers(network).values():
            middle_blocks(transformer)

    def note(self, spec: SamplerSpec, evaluations: int, network: nn.Module) -> str | None:
        """Returns how many evaluations are saved."""
        share = saved_share(network, len(self.steps), evaluations)
        return (
            f"rollout.cache: {len(self.steps)} of the {evaluations} evaluations of a sample skip "
            f"the middle blocks, which saves {share:.0%} of its block evaluations"
        )
