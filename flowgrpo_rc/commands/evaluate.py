"""`flowgrpo-rc evaluate`: score a run's LoRA and its base, on held-out prompts or by suites."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from flowgrpo_rc.build import make_processes, make_suite, make_task
from flowgrpo_rc.commands import EXIT_OK
from flowgrpo_rc.config.checks import check_run, check_suites
from flowgrpo_rc.config.device import device_of
from flowgrpo_rc.config.tree import Config, stored_config
from flowgrpo_rc.distributed.processes import Processes
from flowgrpo_rc.evaluation.held_out import Evaluator
from flowgrpo_rc.evaluation.suite import Suite
from flowgrpo_rc.evaluation.suite_runner import TOTAL, SuiteResult
from flowgrpo_rc.models.lora import reference_policy
from flowgrpo_rc.records.console import Console
from flowgrpo_rc.records.run_folder import RunFolder
from flowgrpo_rc.records.suite_files import BASE, TUNED, sample_stem, write_suite_result
from flowgrpo_rc.report.run import write_report
from flowgrpo_rc.rewards.manager import RewardManager
from flowgrpo_rc.training.tasks.task import Task


def main(arguments: argparse.Namespace) -> int:
    """Evaluates a run."""
    if arguments.suite:
        evaluate_by_suites(arguments.run_dir, arguments.suite, arguments.overrides)
    else:
        evaluate_run(arguments.run_dir, arguments.overrides)
    return EXIT_OK


def evaluate_run(run_dir: str, overrides: Sequence[str]) -> None:
    """Prints the held-out scores of the base model and of the run's exported LoRA.

    Args:
      run_dir: the folder of the run.
      overrides: changes to its settings, such as `rollout.val_kwargs.num_inference_steps=20`.

    Raises:
      ValueError: this is no folder of a run, or the settings cannot work; nothing is loaded.
    """
    _, config = _run(run_dir, overrides)
    inputs = check_run(config, device_of(config), samples=False, trains=False)
    processes = make_processes(config)
    task = make_task(config, processes)
    rewards = RewardManager(config.reward)
    evaluator = Evaluator(task.sample, inputs.held_out, config.rollout.val_kwargs, rewards)
    try:
        with reference_policy(task.model.network):
            before = _scores(evaluator, processes)
        after = _scores(evaluator, processes)
    finally:
        rewards.close()
    _console(processes).final_table(before, after)


def evaluate_by_suites(run_dir: str, suites: Sequence[str], overrides: Sequence[str]) -> None:
    """Compares the run's exported LoRA with the base model by suites; writes both into the report.

    Args:
      run_dir: the folder of the run; it gets `suites/` and a new `report.html`.
      suites: as `trainer.suites`.
      overrides: changes to the run's settings.

    Raises:
      ValueError: this is no folder of a run, or the settings or a suite cannot work; nothing is
        loaded.
    """
    folder, config = _run(run_dir, overrides)
    config.trainer.suites = list(suites)
    asked = check_suites(config)
    processes = make_processes(config)
    task = make_task(config, processes)
    for suite in asked:
        result = _ask(suite, config, task, processes)
        write_suite_result(folder.suites, suite, result)
        _save_samples(folder, suite, result, task)
        _console(processes).suite_table(suite.name, result.comparisons, result.groups)
    if folder.metrics.is_file():
        write_report(folder.root)


def _run(run_dir: str, overrides: Sequence[str]) -> tuple[RunFolder, Config]:
    """Returns the folder of a run and its settings, with its exported LoRA on the model."""
    folder = RunFolder(Path(run_dir))
    config = stored_config(folder.config, overrides)
    config.model.lora_path = str(folder.lora)
    config.trainer.logger = ["console"]
    config.trainer.suites = []
    return folder, config


def _console(processes: Processes) -> Console:
    return Console(total_steps=0, quiet=not processes.is_main)


def _scores(evaluator: Evaluator, processes: Processes) -> dict[str, float]:
    metrics = evaluator.run(processes).metrics
    return metrics.compute(processes.sum, processes.max, processes.device)


def _ask(suite: Suite, config: Config, task: Task, processes: Processes) -> SuiteResult:
    runner = make_suite(suite, config, task)
    try:
        return runner.run(processes, show=True)
    finally:
        runner.close()


def _save_samples(folder: RunFolder, suite: Suite, result: SuiteResult, task: Task) -> None:
    for policy, scores in ((BASE, result.base), (TUNED, result.tuned)):
        prompts = suite.prompts[: len(scores.shown)]
        stem = sample_stem(folder.suites, suite.name, policy)
        firsts = scores.columns[TOTAL][: len(prompts), 0].tolist()
        task.save_samples(stem, scores.shown, prompts, firsts)
