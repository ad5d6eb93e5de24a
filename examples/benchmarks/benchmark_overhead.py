"""Measures how much a training step costs over the bare calls that it needs.

    python examples/benchmarks/benchmark_overhead.py [--rounds 7] [overrides]

The bare step calls the same modules on the same shapes in a plain loop:

* the text encoders, the VAE and the rewards;
* the transformer with its LoRA, in the precision of the rollout, for every denoising step;
* the transformer in the training precision without gradient, where decoupled mode recomputes old
  log-probs;
* forward and backward for every SDE step.

Every sample is trained on in both, in a forward of its own for each step, as `PLAIN` says, unless
the overrides say otherwise.

It has no sampler, no correction, no loss but a sum, no optimizer and no metrics. Training steps and
bare steps take turns, and the printed ratio is that of the medians.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from diffusers.utils import logging as diffusers_logging
from transformers.utils import logging as transformers_logging

from flowgrpo_rc.algorithms.policy_gradient.modes import Decoupled
from flowgrpo_rc.assembly.processes import make_processes
from flowgrpo_rc.assembly.run import assemble
from flowgrpo_rc.config.compose import compose_config, to_config
from flowgrpo_rc.core.random import normal
from flowgrpo_rc.policies.encode_prompts import encode_unique
from flowgrpo_rc.records.run_folder import RunFolder
from flowgrpo_rc.spec.check_inputs import prompts_of
from flowgrpo_rc.spec.machine import machine_of_process
from flowgrpo_rc.spec.resolve import resolve
from flowgrpo_rc.spec.run_spec import RunSpec
from flowgrpo_rc.training.trainer import Trainer

PLAIN = (
    "actor.train_n=null",
    "actor.ppo_micro_batch_size_per_gpu=12",
    "actor.steps_per_forward=1",
    "rollout.algo.shared_prefix=false",
)


def bare_step(spec: RunSpec, run: Trainer) -> None:
    """Makes the calls of one training step and nothing else, in the step's own batch shapes."""
    model: Any = run.task.model
    source: Any = run.source  # of an engine in this process
    config = spec.config
    sampler = config.rollout.spec()
    micro_batch_size = config.actor.ppo_micro_batch_size_per_gpu
    prompts = [p for p in source.prompts(1).prompts for _ in range(config.rollout.n)]
    conditioning = encode_unique(model, prompts, sampler)
    x = normal(model.latent_shape(sampler), range(len(prompts)))
    everyone = torch.arange(len(prompts))
    schedule = model.walked_schedule(sampler)
    window, _, _ = config.rollout.window()
    # Samples of the first mini-batch, whose own forwards give its old log-probs.
    own = 0 if spec.why_recompute else spec.samples_per_mini_batch

    def velocity(transformer: torch.nn.Module, rows: torch.Tensor, t: int) -> torch.Tensor:
        timesteps = schedule.timesteps[t].expand(len(rows))
        return model.velocity(transformer, x[rows], timesteps, conditioning[rows], None, sampler)

    with torch.no_grad():
        for rows in everyone.split(config.rollout.micro_batch_size_per_gpu or micro_batch_size):
            for t in range(len(schedule.timesteps)):
                velocity(source.engine.transformer, rows, t)
            images = model.decode(x[rows], sampler)
            scored = run.rewards.submit(images, [prompts[row] for row in rows.tolist()])
            run.rewards.collect([scored])
    for rows in everyone.split(micro_batch_size):
        for t in range(window):
            if isinstance(run.algorithm, Decoupled) and rows[0] >= own:
                with torch.no_grad():
                    velocity(model.transformer, rows, t)
            velocity(model.transformer, rows, t).sum().backward()
    for parameter in run.update.parameters:
        parameter.grad = None


def main() -> None:
    """Parses the command line, measures, and prints the ratio."""
    for logging in (diffusers_logging, transformers_logging):
        logging.disable_progress_bar()
        logging.set_verbosity_error()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        quiet = [
            "trainer.logger=[]",
            f"trainer.output_dir={folder}",
            "rollout.pipeline.guidance_scale=1.0",
        ]
        config = to_config(compose_config([*PLAIN, *arguments.overrides, *quiet]))
        spec = resolve(config, machine_of_process(config))
        prompts = prompts_of(spec)
        processes = make_processes(config)
        trainer = assemble(spec, RunFolder(Path(folder)), processes, prompts, first_step=0)
        trainer.start(None)
        full = []
        bare = []
        for round_number in range(arguments.rounds + 1):
            start = time.perf_counter()
            trainer.train_step(round_number + 1)
            middle = time.perf_counter()
            bare_step(spec, trainer)
            end = time.perf_counter()
            # The first round warms up.
            if round_number:
                full.append(middle - start)
                bare.append(end - middle)
        trainer.rewards.close()
    step = statistics.median(full)
    calls = statistics.median(bare)
    print(f"training step {step:.3f} s, bare calls {calls:.3f} s, ratio {step / calls:.3f}")


if __name__ == "__main__":
    main()
