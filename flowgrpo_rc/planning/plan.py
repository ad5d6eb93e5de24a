"""The plan of a run: what it would do and need, computed from its configuration.

Models are built on the meta device, and activations are measured on fake tensors: nothing is
allocated, and only small files are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flowgrpo_rc.config.compose import config_folder
from flowgrpo_rc.config.names import RATE
from flowgrpo_rc.models.architecture import find_architecture
from flowgrpo_rc.planning.activations import phase_bytes, samples_at_once
from flowgrpo_rc.planning.operations import operations
from flowgrpo_rc.planning.phases import at_peak, phases
from flowgrpo_rc.planning.weights import (
    Job,
    Row,
    as_size,
    beside_tensors,
    bytes_of_networks,
    memory,
    networks_of,
    numbers_in,
    on_the_host,
    total,
)
from flowgrpo_rc.planning.work import HELD_OUT, Count, counts, passes
from flowgrpo_rc.spec.checks import check_plan
from flowgrpo_rc.spec.run_spec import RunSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a run would need and do; rows are a name, a number and a formula or remark.

    `memory` is held all the time; `phases`, empty if not measured, follow each other; `beside` is
    what no tensor of torch takes. A forward in `counts` is one sample through the transformer.
    `work` has the operations of each part of a step, and then of a held-out sample.
    """

    title: str
    parameters: Sequence[Row]
    memory: Sequence[Row]
    phases: Sequence[Row]
    beside: Sequence[Row]
    host: Sequence[Row]
    counts: Sequence[Count]
    work: Sequence[Row]
    tflops: float

    @property
    def held_bytes(self) -> int:
        """Returns the memory that one process holds all the time."""
        return total(self.memory)

    @property
    def peak_bytes(self) -> int:
        """Returns the most memory that one process needs at once."""
        largest = max((size for _, size, _ in self.phases), default=0)
        return self.held_bytes + total(self.beside) + largest

    def __repr__(self) -> str:
        parameters = [(name, f"{count:,}", remark) for name, count, remark in self.parameters]
        memory = [*self.memory, ("sum", self.held_bytes, "all the time")]
        sections = {"parameters": parameters, "memory of a rank": _sized(memory)}
        if self.phases:
            largest = max(self.phases, key=lambda row: row[1])[0]
            sections["besides, one phase after the other"] = _sized(self.phases)
            formula = f"sum, {largest} and these; activations of fake tensors, not of a card"
            beside = [*self.beside, ("peak", self.peak_bytes, formula)]
            sections["beside torch's tensors"] = _sized(beside)
        sections["memory of a machine's host"] = _sized(self.host)
        sections["plan"] = [*self.counts]
        if self.work:
            rate = f"at {self.tflops:g} TFLOP a second"
            sections[f"work of a rank in a step, {rate}"] = self._shares()
        blocks = [f"{title}\n{_columns(rows)}" for title, rows in sections.items()]
        return "\n\n".join([self.title, *blocks])

    def _shares(self) -> list[Count]:
        """Returns what each part of a step takes, in operations, per cent and seconds."""
        *step, held_out = self.work
        whole = total(step)
        rows = []
        summary = ("sum", whole, "without rewards, which are not counted")
        for name, size, formula in [*step, summary, held_out]:
            seconds = size / self.tflops / 1e12
            time = f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.2g}"
            share = f"{size / whole:4.0%} {time:>9} s"
            shown = f"{size / 1e12:,.0f}" if size > 1e15 else f"{size / 1e12:.3g}"
            rows.append((name, f"{shown} TFLOP", f"{share}  {formula}"))
        return rows


def make_plan(job: Job, *, measure: bool = True, tflops: float = RATE) -> Plan:
    """Plans a run on cards of so many TFLOP a second; to `measure` takes a minute or two."""
    networks = networks_of(job.model).items()
    parameters = [(name, numbers_in(network), type(network).__name__) for name, network in networks]
    share = 100 * job.trained / numbers_in(job.model.network)
    whose = "transformers" if len(job.model.networks) > 1 else "transformer"
    parameters.append(("LoRA", job.trained, f"trained: {share:.2f}% of the {whose}"))
    where = f"{job.processes} processes, {job.strategy}" if job.processes > 1 else "1 process"
    activations: dict[str, int] = {}
    steps: list[Row] = []
    work: list[Row] = []
    if measure:
        for phase, samples in samples_at_once(job.spec).items():
            activations[phase] = phase_bytes(phase, job.spec, job.model, samples)
        steps = phases(job, activations)
        size = operations(job)
        for name, number, _, kind in passes(job):
            formula = f"{number:,} of {size[kind] / 1e12:.3g} TFLOP"
            work.append((name, number * size[kind], formula))
        work.append((HELD_OUT, size[HELD_OUT], "one, in an evaluation"))
    return Plan(
        title=f"{job.config.trainer.experiment_name}: {job.model.pipeline_class} on {where}",
        parameters=parameters,
        memory=memory(job),
        phases=steps,
        beside=beside_tensors(job, at_peak(steps, activations)[1]),
        host=on_the_host(job),
        counts=counts(job),
        work=work,
        tflops=tflops,
    )


def job_of(spec: RunSpec, *, nodes: int = 1) -> Job:
    """Checks settings and builds their model without weights, spread evenly over `nodes`.

    ValueError if the settings cannot work.
    """
    config = spec.settings
    if config.model.kind != "diffusion":
        raise ValueError(
            f"plan knows flow models, model.kind=diffusion; model.kind={config.model.kind}"
        )
    path: Path | str = Path(config.model.path).expanduser()
    if not Path(path).exists():
        architectures = config_folder() / "architectures"
        path = find_architecture(config.model.path, architectures) or config.model.path
    # An exported LoRA to start from changes no size.
    spec = spec.with_sections(model=replace(config.model, path=str(path), lora_path=None))
    built = check_plan(spec)
    assert built is not None, "a flow model"
    job = Job(spec=spec, model=built, network_bytes=bytes_of_networks(built), nodes=nodes)
    tokenizer = job.tokenizers.get("tokenizer")
    if tokenizer is not None and type(tokenizer).__name__.startswith("CLIP"):
        # As the stock pipeline does.
        built.pipeline.tokenizer_max_length = tokenizer.model_max_length
    return job


def _sized(rows: Sequence[Row]) -> list[Count]:
    return [(name, as_size(size), formula) for name, size, formula in rows]


def _columns(rows: Sequence[Count]) -> str:
    first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
    return "\n".join(f"  {a:{first}}  {b:>{second}}  {c}".rstrip() for a, b, c in rows)
