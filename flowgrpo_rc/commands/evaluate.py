"""`flowgrpo-rc evaluate`: score a run's LoRA and its base, on held-out prompts or by suites."""

from __future__ import annotations

import argparse
from pathlib import Path

from flowgrpo_rc.build import make_processes, make_suite, make_task
from flowgrpo_rc.commands import EXIT_OK
from flowgrpo_rc.config.checks import check_run, check_suites
from flowgrpo_rc.config.machine import device_of
from flowgrpo_rc.config.tree import Config, stored_config
from flowgrpo_rc.evaluation.held_out import Evaluator
from flowgrpo_rc.evaluation.suite_runner import TOTAL
from flowgrpo_rc.models.lora import reference_policy
from flowgrpo_rc.records.console import Console
from flowgrpo_rc.records.run_folder import RunFolder
from flowgrpo_rc.records.suite_files import BASE, TUNED, sample_stem, write_suite_result
from flowgrpo_rc.report.run import write_report
from flowgrpo_rc.rewards.manager import RewardManager


def main(arguments: argparse.Namespace) -> int:
    """Evaluates a run."""
    folder = RunFolder(Path(arguments.run_dir))
    config = stored_config(folder.config, arguments.overrides)
    config.model.lora_path = str(folder.lora)
    config.trainer.logger = ["console"]
    config.trainer.suites = list(arguments.suite or [])
    if config.trainer.suites:
        _evaluate_by_suites(folder, config)
    else:
        _evaluate_held_out(config)
    return EXIT_OK


def _evaluate_held_out(config: Config) -> None:
    """Prints the held-out scores of the base model and of the run's exported LoRA."""
    prompts = check_run(config, device_of(config), samples=False, trains=False).prompts
    processes = make_processes(config)
    task = make_task(config, processes)
    rewards = RewardManager(config.reward)
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
    Console(total_steps=0, quiet=not processes.is_main).final_table(before, after)


def _evaluate_by_suites(folder: RunFolder, config: Config) -> None:
    """Compares the run's exported LoRA with the base model by suites, and renews its report."""
    asked = check_suites(config)
    processes = make_processes(config)
    task = make_task(config, processes)
    console = Console(total_steps=0, quiet=not processes.is_main)
    for suite in asked:
        runner = make_suite(suite, config, task)
        try:
            result = runner.run(processes, show=True)
        finally:
            runner.close()
        write_suite_result(folder.suites, suite, result)
        for policy, scores in ((BASE, result.base), (TUNED, result.tuned)):
            prompts = suite.prompts[: len(scores.shown)]
            stem = sample_stem(folder.suites, suite.name, policy)
            firsts = scores.columns[TOTAL][: len(prompts), 0].tolist()
            task.save_samples(stem, scores.shown, prompts, firsts)
        console.suite_table(suite.name, result.comparisons, result.groups)
    if folder.metrics.is_file():
        write_report(folder.root)
