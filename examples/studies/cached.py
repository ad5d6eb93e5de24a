"""Rollouts that use blocks again, and pools of scouts: do they train as well as exact ones?

    python examples/studies/cached.py [--workers 1] [--results FOLDER] [--quick]

Every arm (`ARMS`) has the ladder's 40 iterations of 96 trained images and 4 updates at a constant
rate, and rollouts in fp32. `exact` evaluates all blocks. The cached ones skip two of four blocks at
every second evaluation, `outside` of the steps that are trained or `inside` as well, `third` at two
of three. A pool draws 24 images of a prompt, scores them, and trains on the 12 whose advantages are
farthest from 0: `pool` draws them exactly, `scouts` with the cache, and `redrawn` draws the chosen
12 again with all blocks. `inside_recipe` has the published clip about the plain log-ratio, all
others the default correction: centered, clip_ratio=auto:16.

Fixed before the first run:

* The result of an arm is the reward on 512 held-out words after 40 iterations, less that of `exact`
  seed by seed, over the seeds 1, 2 and 3.
* A cache is recommended if its mean difference is above -0.02, no run ends below its start, and the
  seconds of its rollouts are at most 0.75 of those of `exact`. A seed deviates by about 0.015, so
  that three of them resolve some 0.03: the rule guards against a collapse, not a small loss.
* Scouts cost more than `exact`: they are recommended if the mean difference is above 0.02.
* No setting of an arm is changed after its first run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import ladder
from cells import make_missing
from runs import Run, measure, parse, parser_of

STUDY = "cached"
ROLLOUT = "fp32"
SEEDS = (1, 2, 3)
BUDGET = (*ladder.BUDGET, f"rollout.dtype={ROLLOUT}", "rollout.val_kwargs.n=512")
CENTERED = ladder.ARMS["centered"]
SECOND = ("rollout.cache.every=2", "rollout.cache.window=true")
POOL = ("rollout.n=24", "actor.train_n=12")
ARMS: Mapping[str, Sequence[str]] = {
    "exact": CENTERED,
    "inside": (*CENTERED, *SECOND),
    "inside_recipe": (*ladder.ARMS["recipe"], *SECOND),
    "outside": (*CENTERED, "rollout.cache.every=2"),
    "pool": (*CENTERED, *POOL),
    "scouts": (*CENTERED, *POOL, *SECOND),
    "redrawn": (*CENTERED, *POOL, *SECOND, "rollout.redraw=true"),
}
QUICK = (*ladder.QUICK, f"rollout.dtype={ROLLOUT}")


def overrides(run: Run, budget: Sequence[str] = BUDGET) -> list[str]:
    """Lists the overrides of a run: the budget of all runs, and its arm's settings."""
    return [*budget, *ARMS[run.arm]]


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and makes the runs that are missing."""
    parser = parser_of(__doc__)
    parser.add_argument("--quick", action="store_true")
    options = parse(parser, arguments)
    runs = [Run(ROLLOUT, arm, seed) for seed in SEEDS for arm in ARMS]
    if options.quick:
        runs = [Run(ROLLOUT, "inside", 1)]

    def make(run: Run) -> None:
        budget = QUICK if options.quick else BUDGET
        measure(run, overrides(run, budget), STUDY, options.results)

    make_missing(STUDY, runs, make, workers=options.workers, folder=options.results)


if __name__ == "__main__":
    main()
