"""`flowgrpo-rc eval`: score a run's LoRA and the base model on the held-out prompts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flowgrpo_rc.config.tree import stored_config
from flowgrpo_rc.records.run_folder import RunFolder


def evaluate_run(run_dir: str, overrides: Sequence[str]) -> None:
    """Print the held-out scores of the base model and of the run's exported LoRA."""
    from flowgrpo_rc.build import check_model, make_processes, make_task
    from flowgrpo_rc.models.lora import reference_policy
    from flowgrpo_rc.records.console import Console
    from flowgrpo_rc.rewards.manager import RewardManager
    from flowgrpo_rc.training.evaluation import Evaluator

    folder = RunFolder(Path(run_dir))
    config = stored_config(folder.config, overrides)
    config.model.lora_path = str(folder.lora)
    config.trainer.logger = ["console"]
    config.validate()
    check_model(config)
    _, held_out = config.read_prompts()
    processes = make_processes(config)
    task = make_task(config, processes)
    rewards = RewardManager(config.reward)
    evaluator = Evaluator(task, held_out, config.rollout.val_kwargs, rewards)
    try:
        with reference_policy(task.model.network):
            before = evaluator.run(processes).metrics.compute(
                processes.sum, processes.max, processes.device
            )
        after = evaluator.run(processes).metrics.compute(
            processes.sum, processes.max, processes.device
        )
    finally:
        rewards.close()
    Console(total_steps=0, is_main=processes.is_main).final_table(before, after)
