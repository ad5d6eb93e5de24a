"""How much a training step costs over the bare calls that it needs, measured side by side in one run.

    python examples/benchmark_overhead.py [--rounds 7] [overrides]

The bare step calls the same modules on the same shapes in a plain loop: text encoders, the LoRA-wrapped transformer in
the rollout's precision for every denoising step, VAE, OCR, the transformer in the training precision once more without
gradient (the recompute of decoupled mode), and forward and backward for every SDE step. It has no sampler, no
correction, no loss but a sum, no optimizer and no metrics. Rounds alternate; the printed ratio is that of the medians.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from flowgrpo_rc.compose import compose_config, to_config
from flowgrpo_rc.core.random import normal
from flowgrpo_rc.plugins import load_class
from flowgrpo_rc.rollout.base import RolloutEngine
from flowgrpo_rc.rollout.diffusers_engine import encode_unique
from flowgrpo_rc.run import ROLLOUT_PACKAGE, assemble, make_processes
from flowgrpo_rc.training.run_folder import RunFolder
from flowgrpo_rc.training.trainer import Components, Trainer


def bare_step(parts: Components) -> None:
    """The calls of one training step and nothing else."""
    config, model = parts.config, parts.policy.model
    pipeline, micro = config.rollout.pipeline, config.actor.ppo_micro_batch_size_per_gpu
    prompts = [p for p in parts.sampler.step(0) for _ in range(config.rollout.n)]
    conditioning = encode_unique(model, [p.text for p in prompts], pipeline.max_sequence_length)
    shape = model.latent_shape(pipeline.height, pipeline.width)
    schedule = model.schedule(pipeline.num_inference_steps, pipeline.height, pipeline.width)
    window, _, _ = config.rollout.window()
    for start in range(0, len(prompts), micro):
        rows = torch.arange(start, min(start + micro, len(prompts)))
        x, rows_conditioning = normal(shape, rows.tolist()), conditioning[rows]

        def velocity(transformer: torch.nn.Module, t: int) -> torch.Tensor:
            timesteps = schedule.timesteps[t].expand(len(x))  # noqa: B023
            return model.velocity(transformer, x, timesteps, rows_conditioning, None, 1.0)  # noqa: B023

        with torch.no_grad():
            for t in range(pipeline.num_inference_steps):
                velocity(parts.engine.transformer, t)
            images = model.decode(x)
            if not config.algorithm.rollout_correction.bypass_mode:
                for t in range(window):
                    velocity(model.transformer, t)
        handle = parts.rewards.submit(images, prompts[start : start + micro])
        for t in range(window):
            velocity(model.transformer, t).sum().backward()
        parts.rewards.collect([handle])
    for parameter in parts.update.parameters:
        parameter.grad = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        quiet = ["trainer.logger=[]", f"trainer.output_dir={folder}", "rollout.pipeline.guidance_scale=1.0"]
        config = to_config(compose_config([*arguments.overrides, *quiet]))
        engine_class = load_class(ROLLOUT_PACKAGE, config.rollout.name, RolloutEngine)
        prompts, processes = config.read_prompts(), make_processes(config)
        parts = assemble(config, RunFolder(Path(folder)), processes, prompts, engine_class, first_step=0)
        trainer = Trainer(parts, None)
        full, bare = [], []
        for round_number in range(arguments.rounds + 1):
            start = time.perf_counter()
            trainer.train_step(round_number + 1)
            middle = time.perf_counter()
            bare_step(parts)
            end = time.perf_counter()
            if round_number:  # the first round warms up
                full.append(middle - start)
                bare.append(end - middle)
        parts.rewards.close()
    step, calls = statistics.median(full), statistics.median(bare)
    print(f"training step {step:.3f} s, bare calls {calls:.3f} s, ratio {step / calls:.3f}")


if __name__ == "__main__":
    main()
