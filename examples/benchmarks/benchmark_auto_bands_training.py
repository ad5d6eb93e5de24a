"""Measures what `auto:4` rejects while the bundled job trains, by stage of an iteration.

    python examples/benchmarks/benchmark_auto_bands_training.py [--iterations 40] [overrides]

Later mini-batches are judged after updates, beside samples that came as late. Each step is judged a
second time with an error planted on it: ten robust standard deviations of the mismatch before any
update, up or down. Reported are the shares of clean and of planted steps that `token_k1` rejects,
once the bands are warm, and how far the updates widen the band.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowgrpo_rc.batch import DiffusionBatch
from flowgrpo_rc.build import assemble, make_processes
from flowgrpo_rc.config.check_inputs import prompts_of
from flowgrpo_rc.config.compose import compose_config, to_config
from flowgrpo_rc.core.metrics import MetricBag
from flowgrpo_rc.correction.auto_bands import AutoBands, stage_of
from flowgrpo_rc.correction.thresholds import parse_bands
from flowgrpo_rc.records.run_folder import RunFolder

BAND = "token_k1"
PLANTED = 10.0
RC = "algorithm.rollout_correction"
SETTINGS = (
    "actor.train_n=null",
    f"{RC}.rollout_rs={BAND}",
    f"{RC}.rollout_rs_threshold=auto:4",
    "rollout.dtype=bf16",
    "actor.optim.lr_scheduler=constant",
    "trainer.logger=[]",
)


class Watching(AutoBands):
    """Bands that also judge each step with a planted error, and count by stage."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.steps: dict[int, int] = defaultdict(int)
        self.clean: dict[int, int] = defaultdict(int)
        self.planted: dict[int, int] = defaultdict(int)
        self.widths: dict[int, list[float]] = defaultdict(list)
        self._source = torch.Generator().manual_seed(0)

    def judge(
        self,
        batch: DiffusionBatch,
        training: Tensor,
        step_kl: Tensor | None,
        *,
        updates: int = 0,
        remember: bool = True,
    ) -> tuple[DiffusionBatch, MetricBag]:
        """Returns the decision on the steps as they are."""
        decision = super().judge(batch, training, step_kl, updates=updates, remember=remember)
        stage = stage_of(updates)
        spread = self.scale(BAND).spread
        floor = spread[batch.step_indices]
        width = spread[batch.step_indices + stage * self._num_steps]
        warm = torch.isfinite(floor) & torch.isfinite(width)
        sign = torch.randint(2, training.shape, generator=self._source) * 2 - 1
        off = training + torch.where(warm, PLANTED * sign * floor, 0.0)
        found, _ = super().judge(batch, off, step_kl, updates=updates, remember=False)
        assert decision[0].rejection_mask is not None
        assert found.rejection_mask is not None
        self.steps[stage] += int(warm.sum())
        self.clean[stage] += int((warm & ~decision[0].rejection_mask).sum())
        self.planted[stage] += int((warm & ~found.rejection_mask).sum())
        self.widths[stage] += (width / floor)[warm].tolist()
        return decision


def train(iterations: int, overrides: list[str]) -> Watching:
    """Trains the bundled job; returns its bands."""
    with tempfile.TemporaryDirectory() as folder:
        output = f"trainer.output_dir={folder}"
        config = to_config(compose_config([*SETTINGS, *overrides, output]))
        processes = make_processes(config)
        run_folder = RunFolder(Path(folder))
        trainer = assemble(config, run_folder, processes, prompts_of(config), first_step=1)
        bands = Watching(
            parse_bands(BAND, "auto:4"),
            config.rollout.pipeline.num_inference_steps,
            processes.device,
            num_mini_batches=config.data.train_batch_size // config.actor.ppo_mini_batch_size,
        )
        trainer.algorithm.auto_bands = bands
        trainer.start(None)
        for step in range(1, iterations + 1):
            trainer.train_step(step)
        trainer.close()
    return bands


def main() -> None:
    """Parses the command line, trains, and prints the shares."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    bands = train(arguments.iterations, arguments.overrides)
    total = sum(bands.steps.values())
    rows = {
        f"stage {stage}": {
            "steps": count,
            "band": sum(bands.widths[stage]) / count,
            "clean": bands.clean[stage] / count,
            "planted": bands.planted[stage] / count,
        }
        for stage, count in sorted(bands.steps.items())
        if count
    }
    rows["all"] = {
        "steps": total,
        "clean": sum(bands.clean.values()) / total,
        "planted": sum(bands.planted.values()) / total,
    }
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
