"""The ladder of rollouts: its cells are valid runs, and its table follows the rule written down."""

from __future__ import annotations

import json
import math

import ladder
import ladder_tables
import pytest
import whole_job
import whole_job_tables
from cells import Cell, load
from learning import Run

from flowgrpo_rc.config.compose import compose_config, to_config


@pytest.mark.parametrize("cell", ladder.CELLS, ids="_".join)
def test_every_cell_is_a_valid_run(cell: tuple[str, str]) -> None:
    config = to_config(compose_config(ladder.overrides(Run(*cell, seed=1))))
    assert config.trainer.total_training_steps == ladder.ITERATIONS
    assert config.rollout.val_kwargs.n == 256


def run(rollout: str, arm: str, seed: int, after: float) -> Cell:
    curves = {"reward": [0.5, 0.6], "mismatch": [1e-4, 3e-4]}
    own = {"rollout": rollout, "arm": arm, "seed": seed, "before": 0.5, "after": after}
    return own | {"cpu_seconds": 9.0 if arm == "centered" else 18.0, "curves": curves}


def named(*runs: Cell) -> dict[str, Cell]:
    return {f"{one['rollout']}_{one['arm']}_seed{one['seed']}": one for one in runs}


EXACT = [run("fp32", "bypass", seed, 0.6 + 0.1 * seed) for seed in (1, 2)]


def test_cells_share_one_spread_and_collapsed_ones_are_left_out():
    cells = named(
        *EXACT,
        run("bf16", "centered", 1, 0.71),
        run("bf16", "centered", 2, 0.79),  # +0.01 and -0.01
        run("bf16", "recipe", 1, 0.65),
        run("bf16", "recipe", 2, 0.75),  # -0.05 twice
        run("skip", "recipe", 1, 0.1),  # collapsed
        run("skip", "recipe", 2, 0.4),
    )
    spread = math.sqrt(2 * 0.01**2 / 2)  # over two cells of one degree of freedom each
    assert ladder_tables.spread(cells) == pytest.approx(spread)
    level, beaten = (ladder_tables.against(cells, "bf16", arm) for arm in ("centered", "recipe"))
    assert level is not None
    assert beaten is not None
    assert level.mean == pytest.approx(0)
    assert level.error == pytest.approx(spread / math.sqrt(2))
    assert not level.beaten
    assert beaten.beaten
    assert [ladder_tables.good(cells, arm) for arm in ("centered", "recipe")] == [1, 0]


def test_the_table_takes_partial_data():
    cells = named(*EXACT, run("int4", "recomputed", 1, 0.69), run("int4", "centered", 1, 0.7))
    rows = {row.split(" | ")[0]: row for row in ladder_tables.rewards(cells).splitlines()}
    assert "2.0e-04" in rows["| `int4`"]
    assert "-0.010" in rows["| `int4`"]
    assert "2.00" in rows["| CPU time of a run"]
    assert ladder_tables.num_seeds(cells) == "0 to 1"
    assert math.isinf(ladder_tables.spread(cells))


def test_files_are_small_and_complete():
    for name, cell in load(ladder.STUDY).items():
        assert name == Run(cell["rollout"], cell["arm"], cell["seed"]).name
        assert (cell["rollout"], cell["arm"]) in ladder.CELLS
        assert {len(curve) for curve in cell["curves"].values()} == {ladder.ITERATIONS}
        assert len(json.dumps(cell)) < 6000


def test_the_whole_job_is_trained_with_each_arm():
    for arm, centered in (("plain", False), ("centered", True)):
        config = to_config(compose_config(whole_job.overrides(Run("bf16", arm, seed=1))))
        assert config.algorithm.rollout_correction.centered is centered
        assert config.trainer.total_training_steps == 150
    for arm, loss in (("centered", "flow_grpo"), ("guard", "grpo_guard")):
        config = to_config(compose_config(whole_job.overrides(Run("int4", arm, seed=1))))
        assert config.actor.diffusion_loss.loss_mode == loss
        assert config.rollout.quantization == "int4"


def whole(rollout: str, *runs: tuple[str, int, float]) -> dict[str, Cell]:
    return named(*(run(rollout, *one) | {"before": 0.5} for one in runs))


def test_whole_runs_are_compared_seed_by_seed():
    plain, centered = [("plain", 1, 0.6), ("plain", 2, 0.7)], [("centered", 2, 0.75)]
    cells = whole("bf16", *plain, *centered, ("centered", 3, 0.9))
    assert whole_job_tables.centered(cells).mean == pytest.approx(0.05)
    assert "| `plain` | 1, 2 | 0.600, 0.700 |" in whole_job_tables.ENTRIES["whole_job_rewards"](
        cells
    )


@pytest.mark.parametrize(("behind", "holds"), [(0.019, True), (0.021, False)])
def test_an_arm_is_beaten_beyond_two_standard_errors(behind: float, holds: bool) -> None:
    # Differences of -behind, with a standard deviation of 0.01 sqrt(3) and so an error of 0.01.
    spread = 0.01 * math.sqrt(3)
    guard = [("guard", 1, 0.7), ("guard", 2, 0.7 + spread), ("guard", 3, 0.7 - spread)]
    even = [("centered", seed, 0.7 + behind) for seed in (1, 2, 3)]
    cells = whole("int4", *guard, *even)
    assert whole_job_tables.CLAIMS["whole_job_guard_holds"](cells) is holds
