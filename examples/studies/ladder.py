"""The ladder: how cheap may a rollout be, and which correction trains as well as exact ones?

    python examples/studies/ladder.py [--further] [--seeds 5] [--workers 1] [--results FOLDER]
        [--quick]

A cell is a rollout (`ROLLOUTS`), each cheaper or worse than the last, with an arm (`ARMS`). All
have the budget of `BUDGET` and the same seeds. Each run is a process of its own with one thread,
and leaves one file in FOLDER/ladder. All cells run with their first seed, then all with their
second, so a study that is stopped is balanced; the same command goes on where it was. --quick is
two short runs, to see that the study works.

The rule, written down before the first run:

* The result of a cell is the reward on 256 held-out words after 40 iterations, averaged over the
  seeds, with its standard error.
* One arm beats another on a rollout if their means differ by more than two standard errors of the
  difference, taken seed by seed. Otherwise they are level.
* A rollout is good enough for an arm if the arm is not beaten by exact rollouts (`REFERENCE`).
* The default is the arm that is good enough on most rollouts; of two arms that are level, the one
  that costs less CPU time.
* No setting of an arm is changed after its first run.

Dropped when all runs were there: counting rollouts that are good enough. Cells differ thirtyfold in
their spread, and one or two of 36 comparisons exceed two errors by chance; ladder_tables.py says
what counts instead.

--further makes other cells, whose rule was written down before any of them ran:

* `default` (configs/correction/centered.yaml) on bf16, int4 and weights 8 iterations old, ten seeds
  beside exact rollouts. It is level with them on a rollout if the 95% interval of the difference
  (Student's t) holds 0 and no run collapses; it is behind if the chance is below 5% after Holm's
  correction for the three; else that stays open. It stays the default unless it is behind on bf16
  or int4.
* `tis` and `mis`, the documents' truncated and masked weights of each step, on int4, three seeds:
  they help if none of their runs collapses, where the recipe collapses in all.
* diversity.py measures each of these runs. Cheap rollouts cost diversity if a distance, less that
  of exact rollouts seed by seed, is below 0 with its whole 95% interval.

The clip is 1e-4 for the recipe, as published; 1e-3 about a recomputed old policy, where no mismatch
is in the ratio; and auto:16 in bypass mode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import diversity
from cells import PLAIN_JOB, make_missing
from runs import CLIP, RC, Run, measure, parse, parser_of

STUDY = "ladder"

FEW_BITS = "rollout.name=worse_rollouts.FewBits"
ROLLOUTS: Mapping[str, Sequence[str]] = {
    "fp32": ("rollout.dtype=fp32",),
    "bf16": (),
    "int8": ("rollout.quantization=int8_dynamic",),
    "int4": ("rollout.quantization=int4",),
    "int4_old8": ("rollout.quantization=int4", "rollout.staleness=8"),
    "int4_old16": ("rollout.quantization=int4", "rollout.staleness=16"),
    "bits3": (FEW_BITS, "+rollout.engine_kwargs.bits=3"),
    "bits2": (FEW_BITS, "+rollout.engine_kwargs.bits=2"),
    "reuse": ("rollout.name=worse_rollouts.ReusedVelocity",),
    "skip": ("rollout.name=worse_rollouts.SkippedBlock", "+rollout.engine_kwargs.block=3"),
}
BYPASS = f"{RC}=bypass_ppo_clip"
FITTING = f"{CLIP}=auto:16"
ARMS: Mapping[str, Sequence[str]] = {
    "bypass": (BYPASS, f"{CLIP}=1e-3"),
    "centered": (BYPASS, f"{RC}.centered=true", FITTING),
    "recomputed": (f"{RC}=disabled", f"{CLIP}=1e-3"),
    "centered_recomputed": (f"{RC}=disabled", f"{RC}.centered=true", f"{CLIP}=1e-3"),
    "guard": (BYPASS, "actor.diffusion_loss.loss_mode=grpo_guard", FITTING),
    "recipe": (
        f"{RC}.bypass_mode=true",
        f"{RC}.centered=false",
        f"{RC}.rollout_is=sequence",
        f"{RC}.rollout_rs=seq_mean_k1",
        f"{RC}.rollout_rs_threshold='0.5_2.0'",
        f"{CLIP}=1e-4",
    ),
    "default": (
        BYPASS,
        f"{RC}.centered=true",
        FITTING,
        f"{RC}.rollout_rs=token_k1",
        f"{RC}.rollout_rs_threshold=auto:4",
    ),
    "tis": (f"{RC}=slime_tis", f"{CLIP}=1e-4"),
    "mis": (f"{RC}=slime_mis", f"{CLIP}=1e-4"),
}
REFERENCE = ("fp32", "bypass")
FURTHER = {
    **dict.fromkeys((REFERENCE, ("bf16", "default"), ("int4", "default")), 10),
    ("int4_old8", "default"): 10,
    **dict.fromkeys((("int4", "tis"), ("int4", "mis")), 3),
}
CLIMBERS = ("centered", "recomputed", "centered_recomputed", "guard", "recipe")
RUNGS = tuple(rollout for rollout in ROLLOUTS if rollout != "fp32")
# The worst rollouts come first: they tell the arms apart.
CELLS = (REFERENCE, *((rollout, arm) for rollout in reversed(RUNGS) for arm in CLIMBERS))

# The differences of every run from configs/tiny_ocr.yaml: a quarter of its iterations, all of them
# at the full learning rate.
ITERATIONS = 40
BUDGET = (
    *PLAIN_JOB,
    "rollout.dtype=bf16",
    "rollout.val_kwargs.n=256",
    "actor.optim.lr_scheduler=constant",
    "trainer.num_processes=1",
    f"trainer.total_training_steps={ITERATIONS}",
    "trainer.test_freq=0",
    "trainer.save_freq=0",
    "trainer.logger=[]",
)
QUICK = (
    *BUDGET,
    "trainer.total_training_steps=2",
    "rollout.val_kwargs.n=8",
    "data.train_batch_size=2",
    "rollout.n=4",
    "actor.ppo_micro_batch_size_per_gpu=8",
)
QUICK_CELLS = (("bits3", "centered"),)


def overrides(run: Run, budget: Sequence[str] = BUDGET) -> list[str]:
    """Lists the overrides of a run: the budget of all runs, and the settings of its cell."""
    return [*budget, *ROLLOUTS[run.rollout], *ARMS[run.arm]]


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and makes the runs that are missing."""
    parser = parser_of(__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--further", action="store_true")
    parser.add_argument("--seeds", type=int, default=5)
    options = parse(parser, arguments)
    cells = QUICK_CELLS if options.quick else CELLS
    seeds = 1 if options.quick else options.seeds
    budget = QUICK if options.quick else BUDGET
    runs = [Run(*cell, seed) for seed in range(1, seeds + 1) for cell in cells]
    if options.further:
        most = range(1, max(FURTHER.values()) + 1)
        runs = [Run(*cell, seed) for seed in most for cell, last in FURTHER.items() if seed <= last]

    def make(run: Run) -> None:
        also = diversity.keep if options.further else None
        measure(run, overrides(run, budget), STUDY, options.results, also)

    make_missing(STUDY, runs, make, workers=options.workers, folder=options.results)


if __name__ == "__main__":
    main()
