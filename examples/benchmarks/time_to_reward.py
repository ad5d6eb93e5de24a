"""Time to reward: how many seconds of training a configuration needs for a held-out reward.

    PYTHONPATH=examples/studies python examples/benchmarks/time_to_reward.py [--arms bundled ...]
        [--seeds 8] [--steps 50] [--workers 1] [--peer flow_grpo=CHECKOUT]
        [--clock jobs|levers|without_bf16 [--rounds 3]] [--quick] [--results FOLDER]

An arm is a list of overrides of the bundled job, configs/tiny_ocr.yaml. The arms are in
examples/studies/time_to_reward_arms.py. With --peer, the training scripts of another project run on
the same model, words, reward and batch; time_to_reward_peer.py says how.

* A run is a process of its own with one thread, and it evaluates nothing. It leaves a snapshot of
  its averaged LoRA every ten iterations; the same evaluation then scores all snapshots of all arms:
  256 held-out words, the ODE in fp32, the same noise.
* CPU seconds are those of the process and of its descendants, from the start of the first iteration
  to the end of the one before the snapshot. Loading the model is `setup_cpu_seconds`. Wall seconds
  are of the same interval. Both hold what a run writes, its checkpoints included.
* The time to a reward is the iteration in which the line through the scores of the snapshots first
  reaches it, times the seconds of an iteration. For these, `--clock` runs a few iterations of every
  arm in turn, in several rounds, and trains nothing to its end. A ratio is the median of those of
  the rounds. So the runs may be made on several machines, or on a busy one.

All arms run with their first seed before any runs with its second. Each run leaves one file in
FOLDER/time_to_reward. Runs that have their file are skipped, so the same command goes on after an
interruption.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cells import PLAIN_JOB, RESULTS, load, make_missing, save
from time_to_reward_arms import (
    ARMS,
    DECIDED,
    GOES,
    OURS,
    PEER_ARMS,
    REPEATS,
    STUDY,
    VARIABLES,
    settings,
)
from time_to_reward_tables import GO_TABLES
from time_to_reward_watch import Reading, Watched, watch

HERE = Path(__file__).parent
EVERY = 10  # iterations between two snapshots
WARM, CLOCKED = 3, 4  # iterations of an arm under --clock that are not counted, and that are
HELD_OUT = 256
# Overrides of every run: it measures nothing itself, and keeps all its snapshots.
BUDGET = (
    "trainer.test_freq=0",
    "trainer.max_checkpoints_to_keep=1000",
    "trainer.logger=[]",
    "rollout.val_kwargs.n=1",
    "trainer.num_processes=1",
)
QUICK_STEPS = 2
QUICK = (
    "data.train_batch_size=4",
    "rollout.n=4",
    "rollout.micro_batch_size_per_gpu=8",
    "actor.ppo_micro_batch_size_per_gpu=8",
)


class Plan(NamedTuple):
    """Holds what all runs of a command share.

    Attributes:
      steps: iterations of a run.
      every: iterations between two snapshots.
      held_out: words of the evaluation.
      overrides: further overrides of the bundled job.
      checkouts: name of a peer -> its checkout.
      results: the folder of all studies.
    """

    steps: int
    every: int
    held_out: int
    overrides: Sequence[str]
    checkouts: Mapping[str, Path]
    results: Path


class Run(NamedTuple):
    """One arm with one seed."""

    arm: str
    seed: int

    @property
    def name(self) -> str:
        """Returns the name of the run's file."""
        return f"{self.arm}_seed{self.seed}"

    def overrides(self, plan: Plan, folder: Path) -> list[str]:
        """Lists the overrides of the bundled job for this run."""
        own = (
            f"trainer.total_training_steps={plan.steps}",
            f"trainer.save_freq={plan.every}",
            f"trainer.seed={self.seed}",
            f"trainer.output_dir={folder}",
        )
        # Those of the plan come last: a quick run is small in every arm.
        return [*BUDGET, *ARMS.get(self.arm, PLAIN_JOB), *plan.overrides, *own]

    def command(self, plan: Plan, folder: Path) -> list[str]:
        """Returns the program that trains."""
        if self.arm in ARMS:
            return [sys.executable, "-m", "flowgrpo_rc.train", *self.overrides(plan, folder)]
        peer = PEER_ARMS[self.arm]
        torchrun = ("-m", "torch.distributed.run", "--standalone")
        start = [*torchrun, f"--nproc-per-node={peer.processes}"] if peer.processes > 1 else []
        program = [*start, str(HERE / "time_to_reward_peer.py")]
        program += [f"--set={setting}" for setting in peer.settings]
        given = [str(plan.checkouts[peer.project]), peer.script, *self.overrides(plan, folder)]
        return [sys.executable, *program, *given]


def measure(run: Run, plan: Plan) -> None:
    """Trains once, scores the snapshots, keeps the numbers, and deletes the run's folder.

    Args:
      run: the run.
      plan: what all runs share.

    Raises:
      RuntimeError: the training or the evaluation failed; the message holds its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "run"
        watched = watch(run.command(plan, root), root / "metrics.jsonl", environment())
        # The LoRA of the arm, and everything else as in the bundled job.
        lora = [one for one in ARMS.get(run.arm, ()) if one.startswith("model.lora_")]
        evaluation = [*lora, f"rollout.val_kwargs.n={plan.held_out}", "trainer.logger=[]"]
        program = [str(HERE / "time_to_reward_scores.py"), str(root / "checkpoints")]
        done = subprocess.run(
            [sys.executable, *program, *evaluation],
            env=environment(),
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode != 0:
        raise RuntimeError(f"the scores of {run.name} failed:\n{done.stderr}")
    scored = {int(step): row for step, row in json.loads(done.stdout.splitlines()[-1]).items()}
    about = {**run._asdict(), "settings": settings(run.arm), "iterations": plan.steps}
    save(STUDY, run.name, about | summary(watched, scored), plan.results)


def clock(go: str, arms: Sequence[str], rounds: int, plan: Plan) -> None:
    """Measures the seconds of an iteration of every arm, and keeps them when all are measured.

    Args:
      go: the name under which they are kept.
      arms: the arms; in each round they run in this order.
      rounds: how often each arm runs.
      plan: what all runs share.
    """
    found: dict[str, dict[str, list[float]]] = {arm: defaultdict(list) for arm in arms}
    for number, arm in itertools.product(range(1, 1 + rounds), arms):
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder) / "run"
            command = Run(arm, number).command(plan, root)
            command += DECIDED.get(go, ()) if arm in ARMS else ()
            variables = {**environment(), **VARIABLES.get(go, {})}
            watched = watch(command, root / "metrics.jsonl", variables)
        seconds = iteration_seconds(watched.readings[min(WARM, plan.steps - 1) :])
        for name, value in {**seconds, "peak_memory_gib": watched.peak_memory_gib}.items():
            found[arm][name].append(value)
        print(f"round {number}, {arm}: {seconds['iteration_cpu_seconds']:.2f} CPU s", flush=True)
    save(STUDY, go, {"rounds": rounds, "arms": found}, plan.results)


def environment() -> dict[str, str]:
    """Returns the environment variables of a run: one thread, and this program's imports."""
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}


def iteration_seconds(readings: Sequence[Reading]) -> dict[str, float]:
    """Returns the median CPU and wall seconds of an iteration, `iteration_CLOCK_seconds`."""
    pairs = list(itertools.pairwise(readings))
    return {
        f"iteration_{name}_seconds": statistics.median(
            getattr(after, name) - getattr(before, name) for before, after in pairs
        )
        for name in ("cpu", "wall")
    }


def summary(watched: Watched, scored: Mapping[int, Mapping[str, float]]) -> dict[str, Any]:
    """Makes the numbers of a run's file.

    Args:
      watched: the clocks of the run.
      scored: step -> metric -> value, for step 0 and every snapshot.

    Returns:
      The curve by snapshot, and the seconds of an iteration.
    """
    first = watched.readings[0]
    since = {
        reading.step: (reading.cpu - first.cpu, reading.wall - first.wall)
        for reading in watched.readings
    }
    steps = sorted(scored)
    found: dict[str, Any] = {
        "setup_cpu_seconds": first.cpu,
        "peak_memory_gib": watched.peak_memory_gib,
        "steps": steps,
        "reward": [scored[step]["reward"] for step in steps],
        "exact": [scored[step]["exact"] for step in steps],
    }
    for index, name in enumerate(("cpu", "wall")):
        found[f"{name}_seconds"] = [since[step][index] for step in steps]
    return found | iteration_seconds(watched.readings)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and makes the runs that are missing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arms", nargs="+", choices=(*ARMS, *PEER_ARMS))
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=CHECKOUT")
    parser.add_argument("--clock", choices=GOES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args(arguments)
    if given.quick and given.results == RESULTS:
        parser.error("--quick needs a folder of its own: give --results")
    checkouts = {name: Path(path) for name, _, path in (one.partition("=") for one in given.peer)}
    projects = {arm: peer.project for arm, peer in PEER_ARMS.items()}
    missing = [arm for arm in given.arms or () if projects.get(arm, "") not in {"", *checkouts}]
    if missing:
        parser.error(f"{', '.join(missing)} needs --peer {projects[missing[0]]}=CHECKOUT")
    arms = given.arms or [
        arm
        for arm in (GOES[given.clock] if given.clock else (*OURS, *PEER_ARMS))
        if projects.get(arm, "") in {"", *checkouts} and (given.clock or arm not in REPEATS)
    ]
    plan = Plan(
        steps=QUICK_STEPS if given.quick else WARM + CLOCKED if given.clock else given.steps,
        every=1 if given.quick else EVERY,
        held_out=8 if given.quick else HELD_OUT,
        overrides=QUICK if given.quick else (),
        checkouts=checkouts,
        results=given.results,
    )
    if given.clock:
        clock(given.clock, arms, given.rounds, plan)
        print(GO_TABLES[given.clock](load(STUDY, plan.results)))
        return
    seeds = range(1, 1 + (1 if given.quick else given.seeds))
    runs = [Run(arm, seed) for seed in seeds for arm in arms]
    make_missing(
        STUDY, runs, lambda run: measure(run, plan), workers=given.workers, folder=plan.results
    )


if __name__ == "__main__":
    main()
