"""What a step's decisions leave behind: histograms of all processes, and the rejected samples with
their reasons.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.builders import diffusion_batch, on_shards
from torch import Tensor

from flowgrpo_rc.batch import Prompt, Rewards
from flowgrpo_rc.correction.api import apply_rollout_correction_to_batch
from flowgrpo_rc.correction.config import RolloutCorrectionConfig
from flowgrpo_rc.correction.reasons import Reason, reasons
from flowgrpo_rc.monitoring.decisions import Decision, Decisions, worst_rejected
from flowgrpo_rc.monitoring.histograms import bin_edges, count, edges, histograms
from flowgrpo_rc.records.rejected import (
    STEPS_KEPT,
    RejectedSamples,
    drop_rejected_after,
    in_words,
    read_rejected,
)
from flowgrpo_rc.records.samples import Shown, thumbnail


def normal(*shape: int, scale: float = 1e-4, seed: int = 0) -> Tensor:
    return scale * torch.randn(
        shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def observation(difference: Tensor, kept: Tensor | None = None, **fields: Any) -> Decision:
    """Of samples with the seeds 0, 1, ..."""
    rows = len(difference)
    given = {
        "seed": torch.arange(rows),
        "training_log_probs": difference,
        "rollout_log_probs": torch.zeros_like(difference),
        "step_mask": torch.ones_like(difference, dtype=torch.bool),
        "keep_mask": torch.ones_like(difference, dtype=torch.bool) if kept is None else kept,
        "cells": torch.arange(difference.shape[1]).expand(rows, -1),
        "weights": None,
        "step_kl": None,
        "num_elements": 10,
        "updated": False,
    }
    return Decision(**given | fields)


def test_bins_are_numpys_on_a_logarithmic_grid() -> None:
    """Ten edges for each power of ten, on both sides of zero, from 1e-9 to 1e3."""
    sizes = np.logspace(-9, 3, 121)
    grid = np.concatenate([-sizes[::-1], sizes])
    values = torch.cat(
        [
            normal(500),
            normal(100, scale=1e-8, seed=1),
            normal(50, scale=3.0, seed=2),
            torch.zeros(3),
        ]
    )
    found = count(values).numpy()
    np.testing.assert_array_equal(found, np.histogram(values.numpy(), bins=grid)[0])
    assert found[120] >= 3
    np.testing.assert_allclose(edges(range(-120, 121)), grid, rtol=1e-12)
    assert bin_edges(1) == pytest.approx((1e-9, 10**-8.9))


def test_infinite_values_are_in_the_outermost_bins_and_nan_in_none() -> None:
    found = count(torch.tensor([math.inf, -math.inf, math.nan, 5e3]))
    assert found.nonzero().flatten().tolist() == [0, 240]
    assert found.sum() == 3


def test_histograms_are_those_of_all_processes_before_the_update() -> None:
    difference, weights = normal(6, 3), 1 + normal(6, 3, seed=1)
    valid, kept = torch.ones(6, 3, dtype=torch.bool), torch.ones(6, 3, dtype=torch.bool)
    valid[0, 2], kept[4, 1] = False, False
    whole = {"step_mask": valid, "keep_mask": kept & valid, "weights": weights}
    (alone,) = on_shards(
        1, lambda rank, reduce: histograms([observation(difference, **whole)], reduce["sum"])
    )
    assert sum(alone["log_ratio"].values()) == 17
    assert sum(alone["log_weight"].values()) == 16
    assert (
        alone["log_weight"]
        == histograms([observation(weights[kept & valid].log().unsqueeze(0))])["log_ratio"]
    )

    def shard(rank: int, reduce: Any) -> Any:
        rows = slice(2 * rank, 2 * rank + 2)
        parts = [
            {name: value[r : r + 1] for name, value in whole.items()}
            for r in range(rows.start, rows.stop)
        ]
        pieces = [
            observation(difference[2 * rank + r : 2 * rank + r + 1], **part)
            for r, part in enumerate(parts)
        ]
        later = observation(normal(2, 3, seed=5), updated=True)
        return histograms([*pieces, later], reduce["sum"])

    assert on_shards(3, shard) == [alone] * 3


def test_the_worst_rejected_samples_come_first_and_once() -> None:
    difference, kept = (
        normal(20, 4),
        torch.rand(20, 4, generator=torch.Generator().manual_seed(3)) > 0.3,
    )
    difference[7, 2], kept[7, 2] = math.nan, False
    kept[3] = True
    difference[3, 0] = 1.0  # large, but kept
    # One step at a time, as bypass mode has it.
    seen = [
        observation(difference[:, t : t + 1], kept[:, t : t + 1], cells=torch.full((20, 1), t))
        for t in range(4)
    ]
    sizes = np.where(kept.numpy(), -1.0, difference.abs().nan_to_num(nan=math.inf).numpy())
    order = [row for row in np.argsort(-sizes.max(1)) if sizes[row].max() >= 0]
    found = worst_rejected(seen, 5)
    assert [int(one.seed[row]) for one, row in found] == order[:5]
    assert [int(one.cells[row, 0]) for one, row in found] == sizes.argmax(1)[order[:5]].tolist()
    assert worst_rejected([observation(normal(4, 2))], 3) == []
    assert worst_rejected([], 3) == []


RATIO, MEAN, LOWEST = math.exp(0.02), math.exp(0.005), math.exp(-0.005)


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        (("token_k1", "0.99_1.01"), Reason("token_k1", RATIO, 0.99, 1.01)),
        (("seq_mean_k1", "0.99_1.001"), Reason("seq_mean_k1", MEAN, 0.99, 1.001)),
        (("seq_max_k2", 1e-4), Reason("seq_max_k2", 2e-4, None, 1e-4)),
        (("token_k1", "auto:4"), Reason("token_k1", RATIO)),
        (
            {"rollout_is": "token", "rollout_is_mode": "mask", "rollout_is_threshold": 1.01},
            Reason("rollout_is", RATIO, 1 / 1.01, 1.01),
        ),
        ({"rollout_token_veto_threshold": 0.999}, Reason("veto", LOWEST, 0.999)),
    ],
    ids=["token", "sequence", "k2", "auto", "weights", "veto"],
)
def test_a_rejected_row_says_which_value_left_which_bounds(settings: Any, wanted: Reason) -> None:
    if isinstance(settings, tuple):
        settings = dict(zip(("rollout_rs", "rollout_rs_threshold"), settings, strict=True))
    training = torch.tensor([0.0, 0.02, -0.005], dtype=torch.float64)
    rules = RolloutCorrectionConfig(**settings).rules()
    (found,) = reasons(training, torch.zeros(3), torch.ones(3, dtype=torch.bool), rules)
    assert found.criterion == wanted.criterion
    for value, expected in zip(found[1:], wanted[1:], strict=True):
        assert value == (None if expected is None else pytest.approx(expected, rel=1e-9))


def test_rows_that_are_kept_have_no_reason_and_broken_ones_say_so() -> None:
    config = RolloutCorrectionConfig(rollout_rs="token_k1", rollout_rs_threshold="0.5_2.0")
    mask = torch.tensor([True, True, False])
    kept = torch.tensor([0.1, -0.1, 9.0])
    assert reasons(kept, torch.zeros(3), mask, config.rules()) == []
    (broken,) = reasons(torch.tensor([0.1, math.inf, 0.0]), torch.zeros(3), mask, config.rules())
    assert (broken.criterion, broken.value) == ("not finite", math.inf)


@pytest.mark.parametrize(
    "settings",
    [
        {"rollout_rs": "token_k1,seq_mean_k2", "rollout_rs_threshold": ["0.9_1.2", 0.004]},
        {
            "rollout_rs": "seq_sum_k1",
            "rollout_rs_threshold": "0.9_1.1",
            "rollout_token_veto_threshold": 0.85,
        },
        {"rollout_is": "geometric", "rollout_is_mode": "mask", "rollout_is_threshold": 1.05},
    ],
)
def test_reasons_are_found_for_just_the_rows_that_the_correction_rejects(
    settings: dict[str, Any],
) -> None:
    config, training = RolloutCorrectionConfig(**settings), normal(40, 3, scale=0.08)
    training[11, 1] = math.nan
    batch = diffusion_batch(torch.zeros(40, 3), old_log_probs=training)
    corrected, _ = apply_rollout_correction_to_batch(batch, config)
    rejected = (~corrected.rejection_mask).any(1).tolist()
    assert 5 < sum(rejected) < 35
    found = [
        bool(reasons(row, torch.zeros(3), torch.ones(3, dtype=torch.bool), config.rules()))
        for row in training
    ]
    assert found == rejected


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        (
            Reason("seq_mean_k1", 1.00031, 0.9998, 1.0002),
            "seq_mean_k1: 1.00031, outside 0.9998 to 1.0002",
        ),
        (Reason("step_kl", 2e-4, None, 1e-4), "step_kl: 0.0002, above 0.0001"),
        (Reason("veto", 0.5, 0.9), "veto: 0.5, below 0.9"),
        (Reason("token_k1", 1.5), "token_k1: 1.5"),
        (Reason("mine:f", None), "mine:f"),
    ],
)
def test_reasons_in_words(reason: Reason, text: str) -> None:
    assert in_words(reason._asdict()) == text


def step(
    folder: Path, number: int, *, rank: int = 0, count: int = 1, samples: Any = None
) -> Image.Image | None:
    """Write one step of 6 samples, of which the odd ones are rejected at their second step."""
    difference = 1e-3 * torch.arange(12, dtype=torch.float64).reshape(6, 2)
    kept = torch.ones(6, 2, dtype=torch.bool)
    kept[1::2, 1] = False
    config = RolloutCorrectionConfig(rollout_rs="token_k1", rollout_rs_threshold="0.5_1.0025")
    batch = diffusion_batch(torch.zeros(6, 2)).replace(seed=torch.arange(6) + 100)
    seen = Decisions()
    seen.add(batch, difference, batch.step_indices, kept, None, None)
    images = np.full((6, 8, 12, 3), np.arange(6).reshape(6, 1, 1, 1) * 40, np.uint8)
    shown = Shown(
        [Prompt(text=f"p{i}", index=i) for i in range(6)],
        list(images) if samples is None else samples,
    )
    total = torch.tensor([0.0, 0.1, 0.2, math.nan, 0.4, 0.5])
    rewards = Rewards(total=total, valid=total.isfinite(), parts={})
    writer = RejectedSamples(folder, config, rank=rank, count=count)
    return writer.write(number, seen.take(), batch, shown, rewards, lambda: ["ts_1000", "ts_750"])


def test_rejected_samples_are_written_with_picture_reason_and_step(tmp_path: Path) -> None:
    assert step(tmp_path, 3).size[0] > 3 * 100
    rows = read_rejected(tmp_path)
    assert [(row["prompt"], row["step"], row["timestep"]) for row in rows] == [
        (f"p{i}", 3, 750) for i in (5, 3, 1)
    ]
    assert [row["log_ratio"] for row in rows] == pytest.approx([0.011, 0.007, 0.003])
    assert [row["reward"] for row in rows] == pytest.approx([0.5, None, 0.1])
    (reason,) = rows[0]["reasons"]
    assert reason == {
        "criterion": "token_k1",
        "value": pytest.approx(math.exp(0.011)),
        "lower": 0.5,
        "upper": 1.0025,
    }
    pixels = [np.unique(np.asarray(Image.open(tmp_path / row["picture"]))).tolist() for row in rows]
    assert pixels == [[200], [120], [40]]


def test_texts_need_no_picture_and_latents_alone_have_none(tmp_path: Path) -> None:
    assert step(tmp_path / "texts", 1, samples=[f"answer {i}" for i in range(6)]) is None
    assert [row["text"] for row in read_rejected(tmp_path / "texts")] == [
        "answer 5",
        "answer 3",
        "answer 1",
    ]
    assert step(tmp_path / "latents", 1, samples=[None] * 6) is None
    assert [row["prompt"] for row in read_rejected(tmp_path / "latents")] == ["p5", "p3", "p1"]


def test_what_is_kept_is_bounded_for_every_process(tmp_path: Path) -> None:
    for number in range(1, STEPS_KEPT + 4):
        step(tmp_path, number, rank=1, count=2)
    step(tmp_path, 1, rank=0, count=2)
    rows = read_rejected(tmp_path)
    assert sorted({row["step"] for row in rows}) == [1, *range(4, STEPS_KEPT + 4)]
    assert len(rows) == 2 * (STEPS_KEPT + 1)
    assert len(list(tmp_path.glob("*.png"))) == len(rows)


def test_steps_that_will_be_done_again_are_dropped(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        step(tmp_path, number)
    drop_rejected_after(tmp_path, 1)
    assert {path.name.split("_")[1] for path in tmp_path.iterdir()} == {"000001"}
    drop_rejected_after(tmp_path / "nothing", 1)


@pytest.mark.parametrize(
    ("shape", "wanted"), [((300, 500, 3), (75, 125, 3)), ((9, 260, 130, 3), (87, 132, 3))]
)
def test_thumbnails_are_small(shape: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    sample = np.random.default_rng(0).integers(0, 255, shape, dtype=np.uint8)
    assert thumbnail(sample).shape == wanted
    if len(shape) == 4:
        np.testing.assert_array_equal(thumbnail(sample)[:, 44:88], thumbnail(sample[4]))


def test_a_small_image_is_not_copied() -> None:
    sample = np.zeros((64, 128, 3), np.uint8)
    assert thumbnail(sample) is sample


def test_rows_are_json_without_nan(tmp_path: Path) -> None:
    step(tmp_path, 3)
    (path,) = tmp_path.glob("*.json")
    json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(name))
