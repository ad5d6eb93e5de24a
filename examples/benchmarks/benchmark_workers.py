"""Measures what rollout workers gain: seconds of sampling and of training steps, in turns.

    python examples/benchmarks/benchmark_workers.py [--rounds 3] [--steps 6] [overrides]

Each arm is a process of its own that trains the configuration (the bundled job without overrides):

* `sampling` with 1 and with 2 workers: from the request of a step to its last chunk. Nothing is
  trained, the reward is one that takes no time to speak of, and a step has two chunks (in the
  bundled job it is a single one).
* `step` without workers, with one thread of torch and with two, and with one worker that samples
  the next step meanwhile (`rollout.staleness=1`), where the trainer and the worker have one thread
  each.

A round starts every arm anew; its first two steps are not counted. Loading and starting Ray are not
counted either.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

WARM_UP = 2
OF_SAMPLING = (
    "reward.terms.ocr=null",
    "reward.terms.jpeg.weight=1.0",
    "rollout.micro_batch_size_per_gpu=48",
)


class Arm(NamedTuple):
    """Says what is measured.

    Attributes:
      measured: `sampling` or `step`.
      workers: `rollout.workers`.
      staleness: `rollout.staleness`.
      threads: of torch, in the trainer.
    """

    measured: str
    workers: int
    staleness: int = 0
    threads: int = 1


ARMS = {
    "sampling, 1 worker": Arm("sampling", 1),
    "sampling, 2 workers": Arm("sampling", 2),
    "step, no worker, 1 thread": Arm("step", 0),
    "step, no worker, 2 threads": Arm("step", 0, threads=2),
    "step, 1 worker that samples ahead": Arm("step", 1, staleness=1),
}
RATIOS = (
    ("sampling, 1 worker", "sampling, 2 workers"),
    ("step, 1 worker that samples ahead", "step, no worker, 1 thread"),
    ("step, 1 worker that samples ahead", "step, no worker, 2 threads"),
)


def measure(arm: Arm, steps: int, overrides: list[str]) -> list[float]:
    """Returns the seconds of each of `steps` steps, or of their sampling."""
    import torch

    torch.set_num_threads(arm.threads)
    ends = []
    with assembled(arm, steps, overrides) as trainer:
        trainer.start(None)
        for step in range(1, WARM_UP + steps + 1):
            if arm.measured == "sampling":
                trainer.source.ask(step)()
            else:
                trainer.train_step(step)
            ends.append(time.perf_counter())
    return [end - start for start, end in zip(ends[WARM_UP - 1 :], ends[WARM_UP:], strict=False)]


@contextmanager
def assembled(arm: Arm, steps: int, overrides: list[str]) -> Iterator[Any]:
    """Gives the trainer of a run, and closes it."""
    from flowgrpo_rc.assembly.processes import make_processes
    from flowgrpo_rc.assembly.run import assemble
    from flowgrpo_rc.config.compose import compose_config, to_config
    from flowgrpo_rc.records.run_folder import RunFolder
    from flowgrpo_rc.spec.check_inputs import prompts_of
    from flowgrpo_rc.spec.machine import machine_of_process
    from flowgrpo_rc.spec.resolve import resolve

    with tempfile.TemporaryDirectory() as folder:
        settings = [
            *(OF_SAMPLING if arm.measured == "sampling" else ()),
            "trainer.num_processes=1",
            "trainer.logger=[]",
            # Sampling ahead goes on through the last step that is measured.
            f"trainer.total_training_steps={WARM_UP + steps + arm.staleness}",
            f"trainer.output_dir={folder}",
            f"rollout.workers={arm.workers}",
            f"rollout.staleness={arm.staleness}",
        ]
        config = to_config(compose_config(["actor.train_n=null", *overrides, *settings]))
        spec = resolve(config, machine_of_process(config))
        processes = make_processes(config, quiet=True)
        trainer = assemble(spec, RunFolder(Path(folder)), processes, prompts_of(spec), first_step=0)
        try:
            yield trainer
        finally:
            trainer.close()


def measured_alone(name: str, arguments: argparse.Namespace) -> list[float]:
    """Measures an arm in a process of its own."""
    command = [sys.executable, __file__, "--arm", name, "--steps", str(arguments.steps)]
    threads = {"OMP_NUM_THREADS": str(ARMS[name].threads)}
    done = subprocess.run(
        [*command, *arguments.overrides],
        env=os.environ | threads,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--arm", choices=ARMS, help="measure this one alone, in this process")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    if arguments.arm is not None:
        print(json.dumps(measure(ARMS[arguments.arm], arguments.steps, arguments.overrides)))
        return
    seconds: dict[str, list[float]] = {name: [] for name in ARMS}
    for _ in range(arguments.rounds):
        for name in ARMS:
            seconds[name].append(statistics.median(measured_alone(name, arguments)))
    print(f"{os.cpu_count()} cores, {arguments.rounds} rounds of {arguments.steps} steps")
    for name, found in seconds.items():
        spread = f"{min(found):.3f} to {max(found):.3f}"
        print(f"{name}: {statistics.median(found):.3f} s ({spread})")
    for name, other in RATIOS:
        ratios = [a / b for a, b in zip(seconds[name], seconds[other], strict=True)]
        print(f"{name} / {other}: ratio {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()
