"""`flowgrpo-rc eval`: score a run's LoRA and the base model on the held-out prompts."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from flowgrpo_rc.build import make_processes, make_task
from flowgrpo_rc.commands import EXIT_OK
from flowgrpo_rc.config.checks import check_run
from flowgrpo_rc.config.device import device_of
from flowgrpo_rc.config.tree import stored_config
from flowgrpo_rc.distributed.processes import Processes
from flowgrpo_rc.models.lora import reference_policy
from flowgrpo_rc.records.console import Console
from flowgrpo_rc.records.run_folder import RunFolder
from flowgrpo_rc.rewards.manager import RewardManager
from flowgrpo_rc.training.evaluation import Evaluator


def main(arguments: argparse.Namespace) -> int:
    """Evaluates a run."""
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
    folder = RunFolder(Path(run_dir))
    config = stored_config(folder.config, overrides)
    config.model.lora_path = str(folder.lora)
    config.trainer.logger = ["console"]
    inputs = check_run(config, device_of(config), samples=False, trains=False)
    processes = make_processes(config)
    task = make_task(config, processes)
    rewards = RewardManager(config.reward)
    evaluator = Evaluator(task, inputs.held_out, config.rollout.val_kwargs, rewards)
    try:
        with reference_policy(task.model.network):
            before = _scores(evaluator, processes)
        after = _scores(evaluator, processes)
    finally:
        rewards.close()
    Console(total_steps=0, quiet=not processes.is_main).final_table(before, after)


def _scores(evaluator: Evaluator, processes: Processes) -> dict[str, float]:
    metrics = evaluator.run(processes).metrics
    return metrics.compute(processes.sum, processes.max, processes.device)
