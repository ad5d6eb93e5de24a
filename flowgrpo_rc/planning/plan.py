"""The plan of a run: what it would do and need, computed from its configuration.

Models are built on the meta device, and activations are measured on fake tensors: nothing is
allocated, and only small files are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flowgrpo_rc.config.checks import check_plan
from flowgrpo_rc.config.tree import Config
from flowgrpo_rc.models.architecture import find_architecture
from flowgrpo_rc.planning.activations import activations
from flowgrpo_rc.planning.phases import phases
from flowgrpo_rc.planning.weights import (
    Job,
    Row,
    as_size,
    context,
    memory,
    numbers_in,
    on_the_host,
)
from flowgrpo_rc.planning.work import counts, operations, told


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a run would need and do; rows are a name, a number and a formula or remark.

    Attributes:
      title: of the whole plan.
      parameters: of each part.
      memory: what one process holds all the time.
      phases: what the phases of a step need besides, one after the other; empty if not measured.
      context: what CUDA takes for itself.
      host: of a machine.
      counts: of samples, forwards and updates. A forward is one sample through the transformer.
    """

    title: str
    parameters: Sequence[Row]
    memory: Sequence[Row]
    phases: Sequence[Row]
    context: Row
    host: Sequence[Row]
    counts: Sequence[tuple[str, str, str]]

    @property
    def held_bytes(self) -> int:
        """Returns the memory that one process holds all the time."""
        return sum(size for _, size, _ in self.memory)

    @property
    def peak_bytes(self) -> int:
        """Returns the most memory that one process needs at once."""
        always = self.held_bytes + self.context[1]
        return always + max((size for _, size, _ in self.phases), default=0)

    def __str__(self) -> str:
        parameters = [(name, f"{count:,}", remark) for name, count, remark in self.parameters]
        memory = [*self.memory, ("sum", self.held_bytes, "all the time")]
        sections = [("parameters", parameters), ("memory of a rank", _sized(memory))]
        if self.phases:
            largest = max(self.phases, key=lambda row: row[1])[0]
            formula = f"sum, CUDA and {largest}; measured with fake tensors, not on a card"
            besides = [self.context, *self.phases, ("peak", self.peak_bytes, formula)]
            sections.append(("besides, one phase after the other", _sized(besides)))
        sections.append(("memory of a machine's host", _sized(self.host)))
        sections.append(("plan", list(self.counts)))
        blocks = [f"{title}\n{_columns(rows)}" for title, rows in sections]
        return "\n\n".join([self.title, *blocks])


def make_plan(job: Job, *, measure: bool = True) -> Plan:
    """Plans a run.

    Args:
      job: from `job_of`.
      measure: also measure activations, which takes up to a minute for the largest models.
    """
    networks = job.networks.items()
    parameters = [(name, numbers_in(part), type(part).__name__) for name, part in networks]
    share = 100 * job.trained / numbers_in(job.model.network)
    whose = "transformers" if len(job.model.networks) > 1 else "transformer"
    parameters.append(("LoRA", job.trained, f"trained: {share:.2f}% of the {whose}"))
    where = f"{job.processes} process"
    if job.processes > 1:
        where += f"es, {job.strategy}"
    effort = [told(operations(job).of_a_step(job))] if measure else []
    return Plan(
        title=f"{job.config.trainer.experiment_name}: {job.model.pipeline_class} on {where}",
        parameters=parameters,
        memory=memory(job),
        phases=phases(job, activations(job.config, job.model)) if measure else (),
        context=context(job),
        host=on_the_host(job),
        counts=[*counts(job), *effort],
    )


def job_of(config: Config, processes: int, architectures: Path, *, nodes: int = 1) -> Job:
    """Checks settings and builds their model without weights.

    Args:
      config: the settings.
      processes: how many processes share a step.
      architectures: a folder of pipelines without weights, for hub ids.
      nodes: how many machines the processes are spread over, evenly.

    Raises:
      ValueError: the settings cannot work on any machine, or the model is neither there nor in
        `architectures` nor on the hub.
    """
    if config.model.kind != "diffusion":
        raise ValueError(
            f"plan knows flow models, model.kind=diffusion; model.kind={config.model.kind}"
        )
    path = _location(config.model.path, architectures)
    # An exported LoRA to start from changes no size.
    config = replace(config, model=replace(config.model, path=path, lora_path=None))
    model = check_plan(config, processes)
    assert model is not None, "a flow model"
    return Job(config=config, model=model, processes=processes, nodes=nodes)


def _location(path: str, architectures: Path) -> str:
    """Returns the folder of a model, without weights for a hub id that `architectures` has."""
    folder = Path(path).expanduser()
    if folder.exists():
        return str(folder)
    return str(find_architecture(path, architectures) or path)


def _sized(rows: Sequence[Row]) -> list[tuple[str, str, str]]:
    return [(name, as_size(size), formula) for name, size, formula in rows]


def _columns(rows: Sequence[tuple[str, str, str]]) -> str:
    first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
    return "\n".join(f"  {a:{first}}  {b:>{second}}  {c}".rstrip() for a, b, c in rows)
