"""Time of a training step in decoupled mode over that in bypass mode, with a recompute and without,
measured in turns.

    python examples/benchmarks/benchmark_decoupled.py [--rounds 9] [--threads 1] [overrides]

One mini-batch per rollout, token weights, no rejection, no batch normalisation. Three trainers of
the same model take a step each, in turns; the printed ratios are medians of those of the rounds, by
the clock and by the time of the process on the cores, which other processes on the machine disturb
less.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import torch
from diffusers.utils import logging as diffusers_logging
from transformers.utils import logging as transformers_logging

from flowgrpo_rc.assembly.processes import make_processes
from flowgrpo_rc.assembly.run import assemble
from flowgrpo_rc.config.compose import compose_config, to_config
from flowgrpo_rc.records.run_folder import RunFolder
from flowgrpo_rc.spec.check_inputs import prompts_of
from flowgrpo_rc.spec.machine import machine_of_process
from flowgrpo_rc.spec.resolve import resolve
from flowgrpo_rc.training.trainer import Trainer

CORRECTION = "algorithm.rollout_correction"
ARMS = {
    "bypass": [f"{CORRECTION}=bypass_ppo_clip"],
    "recomputed": [
        f"{CORRECTION}=decoupled_token_is",
        f"{CORRECTION}.rollout_is_batch_normalize=true",
    ],
    "own": [f"{CORRECTION}=decoupled_token_is"],
}


def make_trainer(folder: str, overrides: list[str], stack: ExitStack) -> Trainer:
    """Makes a trainer with one mini-batch per step; overrides of its size have no effect."""
    settings = ["trainer.logger=[]", f"trainer.output_dir={folder}"]
    composed = compose_config(["actor.train_n=null", *overrides, *settings])
    composed.actor.ppo_mini_batch_size = composed.data.train_batch_size
    config = to_config(composed)
    spec = resolve(config, machine_of_process(config))
    trainer = assemble(
        spec, RunFolder(Path(folder)), make_processes(config), prompts_of(spec), first_step=0
    )
    stack.callback(trainer.close)
    trainer.start(None)
    return trainer


def step_seconds(trainer: Trainer, step: int) -> tuple[float, float]:
    """Returns the seconds of one training step: by the clock, and on the cores."""
    clock = time.perf_counter()
    cores = time.process_time()
    trainer.train_step(step)
    return time.perf_counter() - clock, time.process_time() - cores


def main() -> None:
    for logging in (diffusers_logging, transformers_logging):
        logging.disable_progress_bar()
        logging.set_verbosity_error()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    seconds: dict[str, list[tuple[float, float]]] = {arm: [] for arm in ARMS}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        trainers = {
            arm: make_trainer(f"{folder}/{arm}", [*arguments.overrides, *overrides], stack)
            for arm, overrides in ARMS.items()
        }
        for round_number in range(arguments.rounds + 1):
            for arm, trainer in trainers.items():
                timed = step_seconds(trainer, round_number + 1)
                if round_number:  # the first round warms up
                    seconds[arm].append(timed)
    for arm, found in seconds.items():
        clock, cores = (
            statistics.median(
                mine[i] / bypass[i] for mine, bypass in zip(found, seconds["bypass"], strict=True)
            )
            for i in (0, 1)
        )
        step = statistics.median(on_cores for _, on_cores in found)
        print(
            f"{arm}: {clock:.3f} of bypass by the clock, {cores:.3f} on the cores ({step:.3f} s a "
            "step)"
        )


if __name__ == "__main__":
    main()
