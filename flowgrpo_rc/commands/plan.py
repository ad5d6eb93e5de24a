"""`flowgrpo-rc plan`: what a run would do and need, computed from its configuration.

It tells parameters, memory, images, forwards and updates. Models are built on the meta device:
nothing is allocated or run, and only small files are read. With `--workers` it tells how fast a run
would be that samples with workers.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from flowgrpo_rc.commands import EXIT_OK
from flowgrpo_rc.commands.plan_counts import counts
from flowgrpo_rc.commands.plan_memory import as_size, memory, numbers_in, parts_of, strategy_of
from flowgrpo_rc.commands.plan_workers import worker_tables
from flowgrpo_rc.config.checks import check_plan, num_trained
from flowgrpo_rc.config.compose import config_folder, to_config
from flowgrpo_rc.config.settle import settled
from flowgrpo_rc.config.tree import Config


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
    print(make_plan(config, processes, architectures, num_nodes=arguments.nodes))
    return EXIT_OK


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a run would need and do. A forward is one sample through the transformer.

    Attributes:
      title: of the whole plan.
      parameters: part, number, remark.
      memory: part, bytes, formula; of one process.
      counts: name, value, formula.
    """

    title: str
    parameters: Sequence[tuple[str, int, str]]
    memory: Sequence[tuple[str, int, str]]
    counts: Sequence[tuple[str, str, str]]

    @property
    def total_bytes(self) -> int:
        """Returns the memory of one process."""
        return sum(size for _, size, _ in self.memory)

    def __str__(self) -> str:
        parameters = [(name, f"{count:,}", remark) for name, count, remark in self.parameters]
        memory = [(name, as_size(size), formula) for name, size, formula in self.memory]
        total = as_size(self.total_bytes)
        memory.append(("sum", total, "activations and library overhead come on top"))
        sections = (("parameters", parameters), ("memory of a rank", memory), ("plan", self.counts))
        blocks = [f"{title}\n{_columns(rows)}" for title, rows in sections]
        return "\n\n".join([self.title, *blocks])


def make_plan(
    config: Config, num_processes: int, architectures: Path, *, num_nodes: int = 1
) -> Plan:
    """Checks a configuration and plans its run.

    Args:
      config: the settings.
      num_processes: how many processes share a step.
      architectures: a folder of pipelines without weights, for hub ids.
      num_nodes: how many machines the processes are spread over, evenly.

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
    model = check_plan(config, num_processes)
    assert model is not None, "a flow model"
    parameters = [
        (name, numbers_in(part), type(part).__name__) for name, part in parts_of(model).items()
    ]
    trained = num_trained(model)
    share = 100 / numbers_in(model.transformer) * trained
    parameters.append(("LoRA", trained, f"trained: {share:.2f}% of the transformer"))
    where = f"{num_processes} process"
    if num_processes > 1:
        where += f"es, {strategy_of(config, num_processes)}"
    return Plan(
        title=f"{config.trainer.experiment_name}: {model.pipeline_class} on {where}",
        parameters=parameters,
        memory=memory(config, model, num_processes, num_nodes),
        counts=counts(config, model, num_processes),
    )


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
