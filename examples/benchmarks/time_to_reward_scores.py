"""Scores the snapshots of a LoRA on held-out words, after the run that left them.

    python examples/benchmarks/time_to_reward_scores.py FOLDER [overrides]

FOLDER holds the checkpoints of a run; their averaged LoRA is scored, or the LoRA itself if there is
no average. The overrides change the bundled job, whose own evaluation scores them. The result is a
line of JSON: step -> metric -> value, where step 0 is the base model.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from diffusers.utils import logging as diffusers_logging
from transformers.utils import logging as transformers_logging

from flowgrpo_rc.assembly.processes import make_processes
from flowgrpo_rc.assembly.task import make_task
from flowgrpo_rc.config.compose import compose_config, to_config
from flowgrpo_rc.config.tree import Config
from flowgrpo_rc.evaluation.held_out import Evaluator
from flowgrpo_rc.models.lora import lora_parameters
from flowgrpo_rc.records.checkpoint import list_checkpoints, load_checkpoint
from flowgrpo_rc.rewards.manager import RewardManager
from flowgrpo_rc.spec.check_inputs import prompts_of
from flowgrpo_rc.spec.machine import machine_of_process
from flowgrpo_rc.spec.resolve import resolve

METRICS = {"reward": "val/reward", "exact": "val/ocr/exact"}


def scores(config: Config, checkpoints: Path) -> dict[int, dict[str, float]]:
    """Scores the base model and every snapshot.

    Args:
      config: settings of the model, of its LoRA, and of the evaluation.
      checkpoints: the folder of the checkpoints.

    Returns:
      step -> name in `METRICS` -> value.

    Raises:
      ValueError: a snapshot has other tensors than the LoRA of `config`.
    """
    processes = make_processes(config)
    spec = resolve(config, machine_of_process(config))
    task = make_task(spec, processes)
    parameters = lora_parameters(task.model.network)
    held_out = prompts_of(spec).held_out
    rewards = RewardManager(config.reward, spec.rewards)
    evaluator = Evaluator(task.sample, held_out, config.rollout.val_kwargs, rewards)

    def score() -> dict[str, float]:
        found = evaluator.run(processes).metrics
        row = found.compute(processes.sum, processes.max, processes.device)
        return {name: row[metric] for name, metric in METRICS.items()}

    found = {0: score()}  # a new LoRA changes nothing
    try:
        for path in list_checkpoints(checkpoints):
            checkpoint = load_checkpoint(path)
            weights = checkpoint.tensors.get("ema", checkpoint.tensors["lora"])
            if weights.keys() != parameters.keys():
                raise ValueError(f"{path}: its LoRA has other tensors than that of the job")
            with torch.no_grad():
                for name, parameter in parameters.items():
                    parameter.copy_(weights[name])
            found[checkpoint.step] = score()
    finally:
        rewards.close()
    return found


def main() -> None:
    """Parses the command line and prints the scores."""
    for logging in (diffusers_logging, transformers_logging):
        logging.disable_progress_bar()
        logging.set_verbosity_error()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_args()
    config = to_config(compose_config(given.overrides))
    print(json.dumps(scores(config, given.folder)))


if __name__ == "__main__":
    main()
