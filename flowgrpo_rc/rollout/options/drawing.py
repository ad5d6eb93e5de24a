"""Options of which samples are drawn from which noise; no engine has to know them."""

from dataclasses import dataclass, replace

from flowgrpo_rc.batch import SamplerSpec
from flowgrpo_rc.rollout.options.option import Need, RolloutOption


@dataclass(frozen=True)
class SharedPrefix(RolloutOption):
    """Starts the samples of a prompt from the same noise; they differ behind their SDE window."""

    needs = frozenset({Need.SHARED_WINDOW})
    in_engine = False

    @property
    def setting(self) -> str:
        """Returns the setting that chose it."""
        return "rollout.algo.shared_prefix=true"

    def spec(self, spec: SamplerSpec) -> SamplerSpec:
        """Returns the settings with a shared prefix."""
        return replace(spec, shared_prefix=True)


@dataclass(frozen=True)
class Redraw(RolloutOption):
    """Draws the samples that are trained on once more, exactly, and scores them again."""

    needs = frozenset(Need) - {Need.WHOLE_WEIGHTS, Need.PLAIN_WEIGHTS, Need.SHARED_WINDOW}
    in_engine = False

    @property
    def setting(self) -> str:
        """Returns the setting that chose it."""
        return "rollout.redraw=true"
