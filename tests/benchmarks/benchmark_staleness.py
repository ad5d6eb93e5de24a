"""Time of a training step with `rollout.staleness` of 1 over that with 0, measured in turns in one
process.

    python tests/benchmarks/benchmark_staleness.py [--rounds 3] [--steps 6] [--threads 1]
    [overrides]

With 0 one thread samples and trains by turns; with 1 a second one samples the next step meanwhile.
Everything else is
the same: torch's threads for each operation, the reward's own thread, the steps. A round is a new
trainer for each arm; its first steps are not counted, and sampling goes on through its last one.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
from diffusers.utils import logging as diffusers_logging
from transformers.utils import logging as transformers_logging

from flowgrpo_rc.build import assemble, make_processes
from flowgrpo_rc.config.check_inputs import prompts_of
from flowgrpo_rc.config.compose import compose_config, to_config
from flowgrpo_rc.records.run_folder import RunFolder
from flowgrpo_rc.training.trainer import Trainer

WARM_UP = 2


def step_seconds(staleness: int, steps: int, overrides: list[str]) -> list[float]:
    """Returns the seconds of `steps` training steps in a row."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "rollout.staleness": staleness,
            "trainer.total_training_steps": WARM_UP + steps + staleness,
            "trainer.output_dir": folder,
            "trainer.logger": "[]",
        }
        config = to_config(
            compose_config([*overrides, *(f"{key}={value}" for key, value in settings.items())])
        )
        prompts = prompts_of(config)
        processes = make_processes(config)
        parts = assemble(config, RunFolder(Path(folder)), processes, prompts, first_step=0)
        trainer = Trainer(parts, None)
        ends = []
        for step in range(1, WARM_UP + steps + 1):
            trainer.train_step(step)
            ends.append(time.perf_counter())
        parts.source.close()
        parts.rewards.close()
    return [end - start for start, end in zip(ends[WARM_UP - 1 :], ends[WARM_UP:], strict=False)]


def main() -> None:
    for logging in (diffusers_logging, transformers_logging):
        logging.disable_progress_bar()
        logging.set_verbosity_error()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--threads", type=int, default=1, help="of torch, for each operation")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rounds = [
        [step_seconds(staleness, arguments.steps, arguments.overrides) for staleness in (0, 1)]
        for _ in range(arguments.rounds)
    ]
    print(
        f"{os.cpu_count()} cores, {arguments.threads} torch thread(s) for each operation, "
        f"{arguments.rounds} rounds"
    )
    turns, ahead = (
        statistics.median(seconds for arms in rounds for seconds in arms[arm]) for arm in (0, 1)
    )
    ratios = sorted(statistics.median(arms[1]) / statistics.median(arms[0]) for arms in rounds)
    print(
        f"staleness 0: {turns:.3f} s a step; staleness 1: {ahead:.3f} s a step; ratio "
        f"{ahead / turns:.3f}"
    )
    print(f"ratio of single rounds: {ratios[0]:.3f} to {ratios[-1]:.3f}")


if __name__ == "__main__":
    main()
