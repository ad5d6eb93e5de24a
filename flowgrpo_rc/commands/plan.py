"""`flowgrpo-rc plan`: what a run would do and need, computed from its configuration.

It tells parameters, memory, images, forwards and updates. Models are built on the meta device, and
activations are measured on fake tensors: nothing is allocated, and only small files are read. With
`--fit` it proposes settings that fit a card, and with `--workers` it tells how fast a run would be
that samples with workers.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from flowgrpo_rc.commands import EXIT_FAILED, EXIT_OK
from flowgrpo_rc.commands.plan_activations import activations
from flowgrpo_rc.commands.plan_counts import counts
from flowgrpo_rc.commands.plan_fit import Fitter, fits, told
from flowgrpo_rc.commands.plan_memory import (
    Row,
    as_size,
    memory,
    numbers_in,
    parts_of,
    strategy_of,
)
from flowgrpo_rc.commands.plan_phases import context, on_the_host, phases
from flowgrpo_rc.commands.plan_work import told as told_work
from flowgrpo_rc.commands.plan_work import work
from flowgrpo_rc.commands.plan_workers import worker_tables
from flowgrpo_rc.config.checks import check_plan, num_trained
from flowgrpo_rc.config.compose import config_folder, to_config
from flowgrpo_rc.config.settle import settled
from flowgrpo_rc.config.tree import Config
from flowgrpo_rc.models.base import FlowModel


def main(arguments: argparse.Namespace) -> int:
    """Prints the plan of the configuration that the command line asks for, or of workers."""
    if "composition" not in arguments:  # the settings are those of a run
        print(worker_tables(arguments))
        return EXIT_OK
    composition = arguments.composition
    asked = composition.config.trainer.num_processes
    processes = asked if isinstance(asked, int) else 1
    if arguments.processes is not None:
        processes = arguments.processes
    if processes < 1:
        raise ValueError(f"--processes {processes}: give at least 1")
    if arguments.nodes < 1 or processes % arguments.nodes:
        raise ValueError(
            f"--processes {processes} are not spread evenly over --nodes {arguments.nodes}"
        )
    given = to_config(composition.config, num_processes=processes)
    config = settled(given, torch.device("cuda"))
    architectures = config_folder() / "architectures"
    if arguments.fit is None:
        print(make_plan(config, processes, architectures, num_nodes=arguments.nodes))
        return EXIT_OK
    if not arguments.fit > 0:
        raise ValueError(f"--fit {arguments.fit:g}: give the GiB of a card, above 0")
    config, model = planned(config, processes, architectures)
    proposal = Fitter(config, model, processes, arguments.nodes).fit(arguments.fit)
    print(f"{config.trainer.experiment_name} {told(proposal, arguments.fit)}")
    return EXIT_OK if fits(proposal, arguments.fit) else EXIT_FAILED


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a run would need and do. A forward is one sample through the transformer.

    Attributes:
      title: of the whole plan.
      parameters: part, number, remark.
      memory: part, bytes, formula; what one process holds all the time.
      phases: name, bytes, formula; what the phases of a step need besides, one after the other.
        Empty if nobody measured it.
      context: name, bytes, formula; what CUDA takes for itself.
      host: name, bytes, formula; of a machine.
      counts: name, value, formula.
    """

    title: str
    parameters: Sequence[tuple[str, int, str]]
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
        largest = max(self.phases, key=lambda row: row[1], default=None)
        sections = [("parameters", parameters), ("memory of a rank", _sized(memory))]
        if largest is not None:
            formula = f"sum, CUDA and {largest[0]}; measured with fake tensors, not on a card"
            peak = ("peak", self.peak_bytes, formula)
            besides = [self.context, *self.phases, peak]
            sections.append(("besides, one phase after the other", _sized(besides)))
        sections.append(("memory of a machine's host", _sized(self.host)))
        sections.append(("plan", list(self.counts)))
        blocks = [f"{title}\n{_columns(rows)}" for title, rows in sections]
        return "\n\n".join([self.title, *blocks])


def _sized(rows: Sequence[Row]) -> list[tuple[str, str, str]]:
    return [(name, as_size(size), formula) for name, size, formula in rows]


def make_plan(
    config: Config,
    num_processes: int,
    architectures: Path,
    *,
    num_nodes: int = 1,
    measure: bool = True,
) -> Plan:
    """Checks a configuration and plans its run.

    Args:
      config: the settings.
      num_processes: how many processes share a step.
      architectures: a folder of pipelines without weights, for hub ids.
      num_nodes: how many machines the processes are spread over, evenly.
      measure: also measure activations, which takes up to a minute for the largest models.

    Raises:
      ValueError: the settings cannot work on any machine, or the model is neither there nor in
        `architectures` nor on the hub.
    """
    config, model = planned(config, num_processes, architectures)
    parameters = [
        (name, numbers_in(part), type(part).__name__) for name, part in parts_of(model).items()
    ]
    trained = num_trained(model)
    share = 100 / numbers_in(model.network) * trained
    whose = "transformers" if len(model.networks) > 1 else "transformer"
    parameters.append(("LoRA", trained, f"trained: {share:.2f}% of the {whose}"))
    effort = []
    if measure:
        effort.append(told_work(work(config, model).of_a_step(config, model, num_processes)))
    where = f"{num_processes} process"
    if num_processes > 1:
        where += f"es, {strategy_of(config, num_processes)}"
    return Plan(
        title=f"{config.trainer.experiment_name}: {model.pipeline_class} on {where}",
        parameters=parameters,
        memory=memory(config, model, num_processes, num_nodes),
        phases=phases(config, model, num_processes, activations(config, model)) if measure else (),
        context=context(config),
        host=on_the_host(config, model, num_processes, num_nodes),
        counts=[*counts(config, model, num_processes), *effort],
    )


def planned(config: Config, num_processes: int, architectures: Path) -> tuple[Config, FlowModel]:
    """Checks settings; returns them with the model's folder, and the model without weights.

    Args:
      config: the settings.
      num_processes: how many processes share a step.
      architectures: a folder of pipelines without weights, for hub ids.

    Raises:
      ValueError: as `make_plan`.
    """
    if config.model.kind != "diffusion":
        raise ValueError(
            f"plan knows flow models, model.kind=diffusion; model.kind={config.model.kind}"
        )
    path = _location(config.model.path, architectures)
    # An exported LoRA to start from changes no size.
    config = replace(config, model=replace(config.model, path=path, lora_path=None))
    model = check_plan(config, num_processes)
    assert model is not None, "a flow model"
    return config, model


def _location(path: str, architectures: Path) -> str:
    """Returns the folder of a model, without weights for a hub id that `architectures` has."""
    folder = Path(path).expanduser()
    if folder.exists():
        return str(folder)
    for index in sorted(architectures.glob("*/model_index.json")):
        if json.loads(index.read_text())["_name_or_path"] == path:
            return str(index.parent)
    return path


def _columns(rows: Sequence[tuple[str, str, str]]) -> str:
    first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
    return "\n".join(f"  {a:{first}}  {b:>{second}}  {c}".rstrip() for a, b, c in rows)
