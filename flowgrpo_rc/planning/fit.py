"""`flowgrpo-rc plan --fit [GIB]`: the fastest settings of memory with which a run fits a card.

None of them changes what is trained, but for rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch

from flowgrpo_rc.config.names import CARD
from flowgrpo_rc.planning.activations import phase_bytes, samples_at_once
from flowgrpo_rc.planning.phases import at_peak, phases
from flowgrpo_rc.planning.weights import CONTEXT, Job, as_size, beside_tensors, memory, total
from flowgrpo_rc.spec.check_engine import shares_weights
from flowgrpo_rc.spec.machine import in_gib
from flowgrpo_rc.spec.run_spec import RunSpec

HEADROOM = 0.05  # of a card, for what is not planned

# A few samples fill a card while they are decoded; more would only take memory, also for
# workspaces of convolutions, which fake tensors do not show.
_DECODED = 4


@dataclass(frozen=True, slots=True)
class Line:
    """Bytes that grow evenly with the number of samples."""

    one: int  # for one sample
    more: int  # for each further one

    def at(self, samples: int) -> int:
        """Returns the bytes for a number of samples."""
        return self.one + (samples - 1) * self.more


def gib_of(fit: float | str) -> float:
    """Returns the GiB that a run may take of a card: a number, or for `card` of the first GPU.

    That is what is free now and what CUDA has taken here, which the plan counts; on a consumer card
    at most the whole but for a desktop. ValueError for no number, or if no GPU is visible.
    """
    if fit != CARD:
        return in_gib("--fit", fit)
    if not torch.cuda.is_available():
        raise ValueError("--fit: no GPU is visible; give the GiB of a card, such as --fit 24")
    free, total = torch.cuda.mem_get_info(0)
    name = torch.cuda.get_device_name(0)
    # On a card that people also look at; a share, not measured.
    desktop = 2**30 if any(word in name for word in ("GeForce", "Radeon RX")) else 0
    return round(min(free + CONTEXT, total - desktop) / 2**30, 1)


# By phase; `checkpointed` is an update that computes activations again.
Needs = Mapping[str, Line]


def measure_needs(job: Job) -> dict[str, Line]:
    """Measures what one and two samples need, whatever the settings of memory are."""

    def line(phase: str, *, checkpointing: bool = False) -> Line:
        model = replace(job.config.model, gradient_checkpointing=checkpointing)
        run = job.spec.with_sections(model=model)
        one, two = (phase_bytes(phase, run, job.model, samples) for samples in (1, 2))
        return Line(one, two - one)

    lines = {phase: line(phase) for phase in ("update", "rollout", "evaluation", "decoding")}
    rollout = job.config.rollout
    shapes = [job.model.latent_shape(spec) for spec in (rollout.spec(), rollout.held_out_spec())]
    if shapes[0] != shapes[1]:
        lines["shown"] = line("shown")
    return lines | {"checkpointed": line("update", checkpointing=True)}


def activations_of(needs: Needs, run: RunSpec) -> dict[str, int]:
    """Returns the activations of each phase with some settings of memory."""
    lines = {"shown": needs["decoding"], **needs}
    if run.settings.model.gradient_checkpointing:
        lines["update"] = needs["checkpointed"]
    return {phase: lines[phase].at(samples) for phase, samples in samples_at_once(run).items()}


@dataclass(frozen=True, slots=True)
class Proposal:
    """Settings for a card of some GiB, and the bytes of one process with them."""

    spec: RunSpec
    peak: int
    gib: float

    @property
    def overrides(self) -> Sequence[str]:
        """The settings of memory as overrides."""
        config = self.spec.config
        return [
            f"model.gradient_checkpointing={str(config.model.gradient_checkpointing).lower()}",
            f"model.offload_idle={str(config.model.offload_idle).lower()}",
            f"model.decode_batch_size={config.model.decode_batch_size}",
            f"rollout.micro_batch_size_per_gpu={self.spec.chunk_size}",
            f"actor.ppo_micro_batch_size_per_gpu={config.actor.ppo_micro_batch_size_per_gpu}",
        ]

    @property
    def fits(self) -> bool:
        """Whether they fit the card."""
        return self.peak <= self.gib * 2**30 * (1 - HEADROOM)

    def __repr__(self) -> str:
        fits, needs = ("fits", "peak") if self.fits else ("does not fit", "it needs at least")
        return (
            f"{self.spec.config.trainer.experiment_name} {fits} a card of {self.gib:g} GiB with "
            f"{HEADROOM:.0%} to spare: {needs} {as_size(self.peak)} with\n"
            f"  {' '.join(self.overrides)}"
        )


class Fitter:
    """Finds settings for cards of several sizes; measures activations once.

    The run's own settings are the start; `needs` is what `measure_needs` has found, None to measure
    it now.
    """

    def __init__(self, job: Job, *, needs: Needs | None = None) -> None:
        self._job = job
        self._needs = needs or measure_needs(job)
        self._held_bytes: dict[bool | str, int] = {}  # by model.offload_idle
        for offload in (False, True, "layers") if shares_weights(job.spec) else (False, True):
            model = replace(job.config.model, offload_idle=offload)
            offloading = replace(job, spec=job.spec.with_sections(model=model))
            self._held_bytes[offload] = total(memory(offloading))

    def fit(self, gib: float) -> Proposal:
        """Returns the fastest settings that fit a card of some GiB, or those that need least."""
        proposals = []
        for spec in self.candidates():
            proposals.append(Proposal(spec, self.peak(spec), gib))
            if proposals[-1].fits:
                return proposals[-1]
        return min(proposals, key=lambda proposal: proposal.peak)

    def candidates(self) -> Iterator[RunSpec]:
        """Yields settings from the fastest to the smallest.

        Copying idle models takes seconds of a step; computing activations twice a quarter of the
        update. So the first goes before the second. Copying layers for each product comes last.
        """
        config = self._job.config
        mini = self._job.spec.samples_per_mini_batch
        micros = [size for size in range(mini, 0, -1) if mini % size == 0]
        ways = sorted(product((False, True), self._held_bytes), key=lambda way: way[1] == "layers")
        for (checkpointing, offload), micro in product(ways, micros):
            actor = replace(config.actor, ppo_micro_batch_size_per_gpu=micro)
            for sampled in _halves(self._job.spec.chunk_size):
                rollout = replace(config.rollout, micro_batch_size_per_gpu=sampled)
                for decoded in _halves(min(sampled, _DECODED)):
                    model = replace(
                        config.model,
                        gradient_checkpointing=checkpointing,
                        offload_idle=offload,
                        decode_batch_size=decoded,
                    )
                    yield self._job.spec.with_sections(model=model, rollout=rollout, actor=actor)

    def peak(self, spec: RunSpec) -> int:
        """Returns the bytes of one process with other settings of memory."""
        activations = activations_of(self._needs, spec)
        steps = phases(replace(self._job, spec=spec), activations)
        largest, size = at_peak(steps, activations)
        beside = total(beside_tensors(self._job, size))
        return self._held_bytes[spec.settings.model.offload_idle] + largest + beside


def _halves(number: int) -> Iterator[int]:
    """Yields a number, half of it, and so on to 1."""
    while number > 1:
        yield number
        number = (number + 1) // 2
    yield 1
