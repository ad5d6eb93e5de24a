"""The bundled job to its end, with a plain and a centered log-ratio and with GRPO-Guard.

    python examples/studies/whole_job.py [--rollouts int4] [--seeds 5] [--workers 1]
        [--results FOLDER]

The ladder stops after 40 iterations at a constant learning rate. Here the learning rate falls to 0,
as in configs/tiny_ocr.yaml:

* `bf16`: 150 iterations with a plain and with a centered log-ratio, its own clip, and rollouts
  in bf16.
* `int4`: 100 iterations with a centered log-ratio and with Guard, the ladder's clip, and rollouts
  with int4 weights.
* `shipped`: configs/tiny_ocr.yaml as it is, with rollouts in fp32, for the table of README.md.

The rule of `int4`, written down before its first run: Guard leads the ladder, so it becomes the
default, unless the centered ratio ends ahead of it by more than two standard errors.

All arms of a rollout have the same seeds. Each run is a process of its own with one thread, and
leaves one line in FOLDER/whole_job.jsonl; runs that have their line are skipped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cells import PLAIN_JOB, make_missing
from runs import CLIP, RC, Run, measure, parser_of

STUDY = "whole_job"
ROLLOUTS: Mapping[str, Sequence[str]] = {
    "bf16": (*PLAIN_JOB, "rollout.dtype=bf16", "trainer.total_training_steps=150"),
    "int4": (
        *PLAIN_JOB,
        "rollout.dtype=fp32",
        "rollout.quantization=int4",
        "trainer.total_training_steps=100",
        f"{CLIP}=auto:16",
    ),
    "shipped": ("rollout.dtype=fp32",),
}
ARMS: Mapping[str, Mapping[str, Sequence[str]]] = {
    "bf16": {"plain": (f"{RC}.centered=false",), "centered": (f"{RC}.centered=true",)},
    "int4": {
        "centered": (f"{RC}.centered=true",),
        "guard": ("actor.diffusion_loss.loss_mode=grpo_guard",),
    },
    "shipped": {"default": ()},
}
FIRST_SEEDS = {"shipped": 42}  # the job's own; the others begin with 1
BUDGET = ("trainer.num_processes=1", "trainer.logger=[]")


def overrides(run: Run) -> list[str]:
    """Lists the overrides of a run."""
    return [*BUDGET, *ROLLOUTS[run.rollout], *ARMS[run.rollout][run.arm]]


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and makes the runs that are missing."""
    parser = parser_of(__doc__)
    parser.add_argument("--rollouts", nargs="+", choices=(*ROLLOUTS,), default=[*ROLLOUTS])
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args(arguments)
    runs = [
        Run(rollout, arm, FIRST_SEEDS.get(rollout, 1) + number)
        for number in range(options.seeds)
        for rollout in options.rollouts
        for arm in ARMS[rollout]
    ]

    def make(run: Run) -> None:
        measure(run, overrides(run), STUDY, options.results)

    make_missing(STUDY, runs, make, workers=options.workers, folder=options.results)


if __name__ == "__main__":
    main()
