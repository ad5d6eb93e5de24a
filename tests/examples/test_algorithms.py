"""The study of other algorithms: what its arms train, and its table."""

from __future__ import annotations

from typing import Any

import algorithms
import algorithms_tables
import pytest
from learning import Run

from flowgrpo_rc.config.check_settings import check_settings
from flowgrpo_rc.config.compose import compose_config, to_config
from flowgrpo_rc.config.tree import Config


def config_of(arm: str) -> Config:
    words = algorithms.overrides(Run("fp32", arm, seed=1))
    config_name = "tiny_ocr"
    if words[0] == "--config-name":
        config_name, words = words[1], words[2:]
    return to_config(compose_config(words, config_name=config_name))


@pytest.fixture(scope="module")
def configs() -> dict[str, Config]:
    return {arm: config_of(arm) for arm in algorithms.ARMS}


def test_all_arms_have_the_samples_and_updates_of_the_reference(
    configs: dict[str, Config],
) -> None:
    for config in configs.values():
        check_settings(config)
    assert {config.samples_per_step(1) for config in configs.values()} == {96}
    assert {config.total_updates() for config in configs.values()} == {160}
    assert {config.rollout.dtype for config in configs.values()} == {"fp32"}
    assert {arm: config.trained_steps() for arm, config in configs.items() if arm != "fast"} == (
        dict.fromkeys(["flow_grpo", "diffusion_nft", "mix_grpo", "tight_clip", "dual_clip"], 3)
    )
    assert configs["fast"].trained_steps() == 2
    evaluations = {
        arm: sorted({config.rollout.evaluations(step) for step in range(1, 41)})
        for arm, config in configs.items()
    }
    assert evaluations.pop("mix_grpo") == [5, 6, 7]
    assert evaluations.pop("fast") == [5]
    assert list(evaluations.values()) == [[7]] * 4


def test_the_arms(configs: dict[str, Config]) -> None:
    assert configs["diffusion_nft"].knows_no_log_probs()
    starts = [configs["mix_grpo"].rollout.window_at(step)[1] for step in (1, 8, 15, 22, 36)]
    assert starts == [0, 1, 2, 0, 2]
    assert configs["dual_clip"].actor.diffusion_loss.options == {"dual_clip": 4}
    clips = {arm: config.actor.diffusion_loss.clip_ratio for arm, config in configs.items()}
    assert (clips["mix_grpo"], clips["tight_clip"], clips["dual_clip"]) == (1e-3, 1e-4, 1e-4)


def cell(arm: str, seed: int, after: float, seconds: float = 200.0) -> dict[str, Any]:
    return {
        "rollout": "fp32",
        "arm": arm,
        "seed": seed,
        "before": 0.5,
        "after": after,
        "exact_after": 0.25,
        "cpu_seconds": seconds,
    }


def test_the_table() -> None:
    runs = [
        cell("flow_grpo", 1, 0.6),
        cell("flow_grpo", 2, 0.7),
        cell("flow_grpo", 3, 0.9),
        cell("diffusion_nft", 1, 0.5, seconds=100.0),
        cell("diffusion_nft", 2, 0.8, seconds=100.0),
        cell("mix_grpo", 1, 0.65),
    ]
    cells = {str(number): run for number, run in enumerate(runs)}
    assert algorithms_tables.rewards(cells).splitlines()[2:] == [
        "| `flow_grpo` | 1, 2, 3 | 0.733 ± 0.379 | 0.250 ± 0.000 | - | 1.00 |",
        "| `diffusion_nft` | 1, 2 | 0.650 ± 1.906 | 0.250 ± 0.000 | +0.000 ± 1.271 | 0.50 |",
        "| `mix_grpo` | 1 | 0.650 | 0.250 | +0.050 | 1.00 |",
    ]
    assert algorithms_tables.missing(cells) == "`fast`, `tight_clip`, `dual_clip`"
    assert algorithms_tables.rewards({}).splitlines()[2:] == []


@pytest.mark.parametrize(
    ("gaps", "level"),
    [
        ([0.1, -0.1, 0.1, -0.1, 0.0], True),
        ([0.1, 0.1, 0.1, 0.1, 0.11], False),
        ([0.1, -0.1], False),
    ],
)
def test_whether_two_arms_are_level(gaps: list[float], level: bool) -> None:
    pairs = [
        (cell("flow_grpo", seed, 0.6), cell("diffusion_nft", seed, 0.6 + gap))
        for seed, gap in enumerate(gaps)
    ]
    cells = {f"{number}{run['arm']}": run for number, pair in enumerate(pairs) for run in pair}
    assert algorithms_tables.nft_is_level(cells) is level


def test_the_order() -> None:
    runs = [run.name for run in algorithms.plan(2)]
    assert runs[:5] == [
        "fp32_diffusion_nft_seed1",
        "fp32_diffusion_nft_seed2",
        "fp32_flow_grpo_seed1",
        "fp32_flow_grpo_seed2",
        "fp32_mix_grpo_seed1",
    ]
    assert len(runs) == len(set(runs)) == 2 * len(algorithms.ARMS)
