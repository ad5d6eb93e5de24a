"""`flowgrpo-rc evaluate`: score a run's LoRA and its base, on held-out prompts or by suites."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from flowgrpo_rc.assembly.processes import make_console, make_processes
from flowgrpo_rc.assembly.run import make_suite
from flowgrpo_rc.assembly.task import make_task
from flowgrpo_rc.commands import EXIT_OK
from flowgrpo_rc.config.tree import Config, stored_config
from flowgrpo_rc.evaluation.held_out import Evaluator
from flowgrpo_rc.evaluation.suite_runner import TOTAL, SuiteResult
from flowgrpo_rc.models.lora import reference_policy
from flowgrpo_rc.records.metrics_file import held_out
from flowgrpo_rc.records.run_folder import RunFolder
from flowgrpo_rc.records.suite_files import BASE, TUNED, sample_stem, write_suite_result
from flowgrpo_rc.report.run import write_report
from flowgrpo_rc.rewards.manager import RewardManager
from flowgrpo_rc.spec.checks import check_run, check_suites
from flowgrpo_rc.spec.machine import machine_here
from flowgrpo_rc.spec.resolve import resolve


class RunScores(NamedTuple):
    """Holds the held-out metrics of the base model and of the LoRA, or the results of suites."""

    base: Mapping[str, float] = {}
    lora: Mapping[str, float] = {}
    suites: Mapping[str, SuiteResult] = {}


def main(arguments: argparse.Namespace) -> int:
    """Evaluates a run."""
    folder = Path(arguments.run_dir)
    config = stored_config(RunFolder(folder).config, arguments.overrides)
    evaluated(folder, config, arguments.suite or [])
    return EXIT_OK


def evaluated(
    run_dir: Path, config: Config, suites: Sequence[str], *, quiet: bool = False
) -> RunScores:
    """Evaluates a run by these settings, and prints what it has found unless `quiet`."""
    folder = RunFolder(run_dir)
    config.model.lora_path = str(folder.lora)
    config.trainer.logger = ["console"]
    config.trainer.suites = list(suites)
    if suites:
        return RunScores(suites=_evaluate_by_suites(folder, config, quiet=quiet))
    return _evaluate_held_out(config, quiet=quiet)


def _evaluate_held_out(config: Config, *, quiet: bool) -> RunScores:
    """Scores the base model and the run's exported LoRA."""
    spec = resolve(config, machine_here(config))
    prompts = check_run(spec, samples=False, trains=False).prompts
    processes = make_processes(config, quiet=quiet)
    task = make_task(spec, processes)
    rewards = RewardManager(config.reward, spec.rewards)
    evaluator = Evaluator(task.sample, prompts.held_out, config.rollout.val_kwargs, rewards)

    def scores() -> dict[str, float]:
        metrics = evaluator.run(processes).metrics
        return metrics.compute(processes.sum, processes.max, processes.device)

    try:
        with reference_policy(task.model.network):
            before = scores()
        after = scores()
    finally:
        rewards.close()
    make_console(config, processes, quiet=quiet).final_table(before, after)
    return RunScores(held_out(before), held_out(after))


def _evaluate_by_suites(
    folder: RunFolder, config: Config, *, quiet: bool
) -> dict[str, SuiteResult]:
    """Compares the run's exported LoRA with the base model by suites, and renews its report."""
    spec = resolve(config, machine_here(config))
    suites = check_suites(spec)
    processes = make_processes(config, quiet=quiet)
    task = make_task(spec, processes)
    console = make_console(config, processes, quiet=quiet)
    results = {}
    for suite in suites:
        runner = make_suite(suite, spec, task)
        try:
            result = results[suite.name] = runner.run(processes, show=True)
        finally:
            runner.close()
        write_suite_result(folder.suites, suite, result)
        for policy, scores in ((BASE, result.base), (TUNED, result.tuned)):
            prompts = suite.prompts[: len(scores.shown)]
            stem = sample_stem(folder.suites, suite.name, policy)
            firsts = scores.columns[TOTAL][: len(prompts), 0].tolist()
            task.save_samples(stem, scores.shown, prompts, firsts)
        title = f"{suite.name}, protocol {result.protocol.told()}"
        console.suite_table(title, result.comparisons, result.groups)
    if folder.metrics.is_file():
        write_report(folder.root)
    return results
