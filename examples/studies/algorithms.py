"""Other algorithms beside FlowGRPO, on the bundled task with the same samples and updates.

    python examples/studies/algorithms.py [--seeds 5] [--workers 1] [--results FOLDER]
        [--quick | --quantized]

The reference is FlowGRPO on exact rollouts, as the cell `REFERENCE` of the ladder; it runs again,
so that its CPU seconds are those of the same machine. Every arm (`ARMS`) has its 40 iterations of
96 images and 4 updates, and trains 3 steps, or 3 noise levels, of each image; `fast` trains 2. All
sample in fp32, so that there is no mismatch to correct, with 7 evaluations of the network for an
image; with `mix_grpo` they are 5 to 7, with `fast` 5. Each run is a process of its own with one
thread, and leaves one file in FOLDER/algorithms; the same command goes on where it was stopped.
DiffusionNFT and the reference come first, with all seeds, and then the others. --quick is one short
run, to see that the study works.

Fixed before the first run: the result is the reward on 256 held-out words after 40 iterations. Two
arms differ if the mean difference, seed by seed, is above two standard errors, which takes several
seeds. No setting of an arm is changed after its first run. beta=1 of DiffusionNFT and its learning
rate, that of the bundled job, were not searched.

--quantized asks what `model.quantization` costs the reference: `int8_weights` and `int4_weights`
are the reference with its frozen weights rounded, in training and in the rollouts, which share
them; three seeds each. Fixed before their first run: an arm is level with the reference if the 95%
interval of the difference (Student's t), seed by seed, holds 0, and behind if it lies below 0. With
three seeds the interval has a half-width of 2.5 standard deviations of a difference, so that only a
loss beyond it could be seen. Each LoRA is also scored on the full weights, with which others load
it, in the cells whose rollout is `full`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import ladder
from cells import make_missing, save
from ladder import REFERENCE
from runs import Run, measure, parse, parser_of

from flowgrpo_rc.commands.evaluate import evaluated
from flowgrpo_rc.config.tree import stored_config

STUDY = "algorithms"
ROLLOUT, _ = REFERENCE
BUDGET = (*ladder.BUDGET, f"rollout.dtype={ROLLOUT}")
FLOW_GRPO = ladder.ARMS["bypass"]
WINDOW = "rollout.algo.sde_window"
ARMS: Mapping[str, Sequence[str]] = {
    "flow_grpo": FLOW_GRPO,
    # 7 evaluations of second order, in place of 10 of which FlowGRPO's tail leaves out 3
    "diffusion_nft": (
        "--config-name",
        "tiny_ocr_nft",
        "rollout.pipeline.num_inference_steps=7",
        "rollout.algo.tail=ab2",
    ),
    # the three places of the window, twice
    "mix_grpo": (*FLOW_GRPO, f"{WINDOW}_interval=7"),
    "fast": (*FLOW_GRPO, f"{WINDOW}_size=2", f"{WINDOW}_range=[0,3]"),
}
# Not compared with the others: the reference with frozen weights in few bits.
QUANTIZED: Mapping[str, Sequence[str]] = {
    f"{name}_weights": (*FLOW_GRPO, f"model.quantization={name}") for name in ("int8", "int4")
}
FULL = "full"
FIRST = ("diffusion_nft", "flow_grpo")
QUICK = (*ladder.QUICK, f"rollout.dtype={ROLLOUT}")


def overrides(run: Run, budget: Sequence[str] = BUDGET) -> list[str]:
    """Lists the overrides of a run: its arm's settings, and the budget of all runs."""
    return [*(ARMS | QUANTIZED)[run.arm], *budget]


def plan(num_seeds: int) -> list[Run]:
    """Lists the runs in their order: the first arms with all seeds, then the others by seed."""
    seeds = range(1, num_seeds + 1)
    others = [Run(ROLLOUT, arm, seed) for seed in seeds for arm in ARMS if arm not in FIRST]
    return [*(Run(ROLLOUT, arm, seed) for arm in FIRST for seed in seeds), *others]


def score_on_full_weights(name: str, root: Path, results: Path) -> None:
    """Scores the LoRA of a run on weights that are not quantized, and saves a cell of its own."""
    config = stored_config(root / "config.yaml")
    run = Run(FULL, f"{config.model.quantization}_weights", config.trainer.seed)
    config.model.quantization = None
    scores = evaluated(root, config, (), quiet=True)
    found = {"before": scores.base["reward"], "after": scores.lora["reward"]}
    save(STUDY, run.name, run._asdict() | found, results)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and makes the runs that are missing."""
    parser = parser_of(__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--quantized", action="store_true")
    parser.add_argument("--seeds", type=int, default=5)
    options = parse(parser, arguments)
    runs = plan(1)[:1] if options.quick else plan(options.seeds)
    if options.quantized:
        runs = [Run(ROLLOUT, arm, seed) for seed in (1, 2, 3) for arm in QUANTIZED]
    budget = QUICK if options.quick else BUDGET

    def make(run: Run) -> None:
        also = score_on_full_weights if options.quantized else None
        measure(run, overrides(run, budget), STUDY, options.results, also)

    make_missing(STUDY, runs, make, workers=options.workers, folder=options.results)


if __name__ == "__main__":
    main()
