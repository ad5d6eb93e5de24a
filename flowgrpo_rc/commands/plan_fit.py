"""`flowgrpo-rc plan --fit GIB`: the fastest settings of memory with which a run fits a card.

None of them changes what is trained, but for rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from flowgrpo_rc.commands.plan_activations import (
    Activations,
    decoding_bytes,
    evaluation_bytes,
    rollout_bytes,
    rows_at_once,
    rows_of,
    update_bytes,
)
from flowgrpo_rc.commands.plan_memory import as_size, memory
from flowgrpo_rc.commands.plan_phases import context, phases
from flowgrpo_rc.config.check_engine import chunk_size
from flowgrpo_rc.config.tree import Config
from flowgrpo_rc.models.base import FlowModel

HEADROOM = 0.08  # of a card, for what fragments its memory and what is not planned

# A few samples fill a card while they are decoded; more would only take memory, also for
# workspaces of convolutions, which fake tensors do not show.
_DECODED = 4


@dataclass(frozen=True, slots=True)
class Line:
    """Bytes that grow evenly with the number of samples.

    Attributes:
      one: bytes for one sample.
      more: bytes for each further one.
    """

    one: int
    more: int

    def at(self, samples: int) -> int:
        """Returns the bytes for a number of samples."""
        return self.one + (samples - 1) * self.more


@dataclass(frozen=True, slots=True)
class Needs:
    """Activations of each phase by the number of samples, whatever the settings of memory are.

    Attributes:
      update: forward and backward of a micro-batch.
      checkpointed: the same with gradient checkpointing.
      rollout: a forward.
      evaluation: a forward of held-out samples.
      decoding: the VAE's.
    """

    update: Line
    checkpointed: Line
    rollout: Line
    evaluation: Line
    decoding: Line

    def of(self, config: Config) -> Activations:
        """Returns the activations with some settings of memory."""
        rows = rows_of(config)
        update = self.checkpointed if config.model.gradient_checkpointing else self.update
        return Activations(
            update=update.at(rows.update),
            rollout=self.rollout.at(rows.rollout),
            decoding=self.decoding.at(rows.decoding),
            evaluation=self.evaluation.at(rows.evaluation),
            shown=self.decoding.at(rows.shown),
        )


def measure_needs(config: Config, model: FlowModel) -> Needs:
    """Measures what one and two samples need.

    Args:
      config: the settings; those of memory do not matter.
      model: on the meta device, with its LoRA.
    """
    together = rows_at_once(config) // config.actor.ppo_micro_batch_size_per_gpu
    update, checkpointed = (
        _line(*(update_bytes(_checkpointing(config, keeps), model, n * together) for n in (1, 2)))
        for keeps in (False, True)
    )
    return Needs(
        update=update,
        checkpointed=checkpointed,
        rollout=_line(*(rollout_bytes(config, model, n) for n in (1, 2))),
        evaluation=_line(*(evaluation_bytes(config, model, n) for n in (1, 2))),
        decoding=_line(*(decoding_bytes(config, model, n) for n in (1, 2))),
    )


@dataclass(frozen=True, slots=True)
class Proposal:
    """Settings, and what they need.

    Attributes:
      config: the settings.
      peak: bytes of one process.
    """

    config: Config
    peak: int

    @property
    def overrides(self) -> Sequence[str]:
        """Returns the settings of memory as overrides."""
        model, actor = self.config.model, self.config.actor
        return [
            f"model.gradient_checkpointing={str(model.gradient_checkpointing).lower()}",
            f"model.offload_idle={str(model.offload_idle).lower()}",
            f"model.decode_batch_size={model.decode_batch_size}",
            f"rollout.micro_batch_size_per_gpu={chunk_size(self.config)}",
            f"actor.ppo_micro_batch_size_per_gpu={actor.ppo_micro_batch_size_per_gpu}",
        ]


class Fitter:
    """Finds settings for cards of several sizes; measures activations once."""

    def __init__(
        self,
        config: Config,
        model: FlowModel,
        num_processes: int,
        num_nodes: int = 1,
        *,
        needs: Needs | None = None,
    ) -> None:
        """Takes the settings to start from.

        Args:
          config: the settings.
          model: on the meta device, with its LoRA.
          num_processes: how many processes share a step.
          num_nodes: how many machines they are spread over, evenly.
          needs: what `measure_needs` has found; None to measure it now.

        Raises:
          ValueError: the sizes of forwards are part of what is asked for.
        """
        if config.actor.replay == "aligned":
            raise ValueError(
                "--fit: actor.replay=aligned ties the sizes of forwards in rollout and update to "
                "each other; choose them by hand, or drop it"
            )
        self._config, self._model = config, model
        self._num_processes, self._num_nodes = num_processes, num_nodes
        self._held = {offload: self._always(offload) for offload in (False, True)}
        self._needs = needs or measure_needs(config, model)

    def _always(self, offload: bool) -> int:
        config = self._config
        config = replace(config, model=replace(config.model, offload_idle=offload))
        rows = memory(config, self._model, self._num_processes, self._num_nodes)
        return sum(size for _, size, _ in rows) + context(config)[1]

    def fit(self, gib: float) -> Proposal:
        """Returns the fastest settings that fit; if none does, those that need least.

        Args:
          gib: memory of a card in GiB.
        """
        least: Proposal | None = None
        for config in self._candidates():
            found = Proposal(config, self.peak(config))
            if fits(found, gib):
                return found
            if least is None or found.peak < least.peak:
                least = found
        assert least is not None
        return least

    def _candidates(self) -> Iterator[Config]:
        """Yields settings from the fastest to the smallest.

        Copying idle models takes seconds of a step; computing activations twice a quarter of the
        update. So the first goes before the second.
        """
        config = self._config
        mini = config.samples_per_mini_batch(self._num_processes)
        chunk = chunk_size(config)
        for checkpointing in (False, True):
            for offload in (False, True):
                for micro in (n for n in range(mini, 0, -1) if mini % n == 0):
                    for sampled in _halves(chunk):
                        for decoded in _halves(min(sampled, _DECODED)):
                            yield _with(config, checkpointing, offload, micro, sampled, decoded)

    def peak(self, config: Config) -> int:
        """Returns the bytes of one process with other settings of memory."""
        besides = phases(config, self._model, self._num_processes, self._needs.of(config))
        return self._held[config.model.offload_idle] + max(size for _, size, _ in besides)


def told(proposal: Proposal, gib: float) -> str:
    """Returns a proposal as text."""
    settings = " ".join(proposal.overrides)
    if fits(proposal, gib):
        return (
            f"fits a card of {gib:g} GiB with {HEADROOM:.0%} to spare: peak "
            f"{as_size(proposal.peak)} with\n  {settings}"
        )
    return (
        f"does not fit a card of {gib:g} GiB with {HEADROOM:.0%} to spare: at least "
        f"{as_size(proposal.peak)} are needed, with\n  {settings}"
    )


def fits(proposal: Proposal, gib: float) -> bool:
    """Returns whether a proposal fits a card."""
    return proposal.peak <= gib * 2**30 * (1 - HEADROOM)


def _line(one: int, two: int) -> Line:
    return Line(one, two - one)


def _halves(number: int) -> Iterator[int]:
    """Yields a number, half of it, and so on to 1."""
    while number > 1:
        yield number
        number = (number + 1) // 2
    yield 1


def _checkpointing(config: Config, keeps: bool) -> Config:
    return replace(config, model=replace(config.model, gradient_checkpointing=keeps))


def _with(
    config: Config, checkpointing: bool, offload: bool, micro: int, sampled: int, decoded: int
) -> Config:
    return replace(
        config,
        model=replace(
            config.model,
            gradient_checkpointing=checkpointing,
            offload_idle=offload,
            decode_batch_size=decoded,
        ),
        rollout=replace(config.rollout, micro_batch_size_per_gpu=sampled),
        actor=replace(config.actor, ppo_micro_batch_size_per_gpu=micro),
    )
