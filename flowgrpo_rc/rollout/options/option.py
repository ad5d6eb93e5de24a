"""Says what every option of the rollout tells of itself and does to the copy that samples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar

import torch
from torch import nn

from flowgrpo_rc.batch import SamplerSpec
from flowgrpo_rc.models.block_cache import BlockCache


class Need(Enum):
    """Names what an option may need of a run; its value completes the sentence that refuses it."""

    NETWORK = "a copy of the trainer's network"
    WHOLE_WEIGHTS = "the trainer's whole weights on each process"
    PLAIN_WEIGHTS = "frozen weights that nothing has rounded"
    SHARED_WINDOW = "the same window for all samples of a prompt"
    TRAINER_PROCESS = "samples of the trainer's own process"
    FRESH_WEIGHTS = "samples of the weights that are trained"
    NEW_SAMPLES = "samples that the run draws"
    UNSAVED_SAMPLES = "samples that are not saved"
    ONE_POOL = "all samples of a step at once"
    WHOLE_GROUPS = "groups that keep what is rejected"
    SINGLE_SCORES = "rewards that score each sample alone"


@dataclass(eq=False)
class SamplingNetwork:
    """The copy of a network that samples, which options change.

    network: the copy.
    trained: the network that it follows.
    lora: the parameters of its LoRA, by name.
    dtype: the precision of its plain weights.
    precision: the same in words, with a quantization.
    cache: what lets it skip blocks; None if it never does.
    after_sync: what has to be done when a LoRA has arrived.
    """

    network: nn.Module
    trained: nn.Module
    lora: Mapping[str, nn.Parameter]
    dtype: torch.dtype
    precision: str
    cache: BlockCache | None = None
    after_sync: list[Callable[[], None]] = field(default_factory=list)


class RolloutOption(ABC):
    """A way to sample that settings choose.

    Attributes:
      needs: what a run must give it.
      removes: what a run with it cannot give other options.
      in_engine: whether the engine applies it, which must then list it in `RolloutEngine.options`.
      packages: what has to be installed, an extra of this project.
      shares_weights: whether a copy in the trainer's precision may hold the trainer's own tensors.
    """

    needs: ClassVar[frozenset[Need]] = frozenset()
    removes: ClassVar[frozenset[Need]] = frozenset()
    in_engine: ClassVar[bool] = True
    packages: ClassVar[Sequence[str]] = ()
    shares_weights: ClassVar[bool] = True

    @property
    @abstractmethod
    def setting(self) -> str:
        """Returns the setting that chose it, `key=value`."""

    def spec(self, spec: SamplerSpec) -> SamplerSpec:
        """Returns the settings of a sampler with this option."""
        return spec

    def wrap(self, copy: SamplingNetwork) -> None:  # noqa: B027 - some change the noise alone
        """Changes the copy that samples."""

    def check_network(self, network: nn.Module) -> None:  # noqa: B027 - most suit all
        """Raises ValueError if it does not suit a network, which may hold no weights."""

    def check_device(  # noqa: B027 - most run everywhere
        self, device: torch.device, others: Sequence[RolloutOption]
    ) -> None:
        """Raises ValueError if it cannot run on a device beside the `others`."""

    def rounding_explains(self, training_dtype: str) -> bool:
        """Returns whether rounding explains all of the mismatch that it adds."""
        return True

    def note(self, spec: SamplerSpec, evaluations: int, network: nn.Module) -> str | None:
        """Returns what a user should know of it; a sample has so many `evaluations`."""
        return None
