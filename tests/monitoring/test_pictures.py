"""Statistics of pictures against plain formulas, and the warning about pictures that drift."""

from __future__ import annotations

import colorsys
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from bundled_models.glyphs import random_word, render

from flowgrpo_rc.correction.config import RolloutCorrectionConfig
from flowgrpo_rc.monitoring.health import DRIFT, HealthMonitor
from flowgrpo_rc.monitoring.health_rules import Setup
from flowgrpo_rc.monitoring.pictures import (
    SIDE,
    STATISTICS,
    PictureFacts,
    PictureWatch,
    observe_pictures,
)

# Of 57 steps of the bundled job with its own settings (`flowgrpo-rc train`).
CORRECTION = RolloutCorrectionConfig()
SETUP = Setup.of(CORRECTION, CORRECTION.rules(), text=False, fresh=True, unquantized=None)
CLEAN = Path(__file__).parents[1] / "support" / "clean_pictures.jsonl"
GROUPS, SIZE = 8, 3


def by_hand(image: np.ndarray) -> list[float]:
    """Measures one picture pixel by pixel."""
    pixels = image.astype(float) / 255
    height, width, _ = pixels.shape
    luma = pixels @ [0.299, 0.587, 0.114]
    saturation = [colorsys.rgb_to_hsv(*pixel)[1] for row in pixels for pixel in row]
    edges, detail = 0.0, 0.0
    for y in range(height):
        for x in range(width):
            up, down = luma[max(0, y - 1), x], luma[min(height - 1, y + 1), x]
            left, right = luma[y, max(0, x - 1)], luma[y, min(width - 1, x + 1)]
            edges += (abs(down - luma[y, x]) + abs(right - luma[y, x])) / 2
            detail += (luma[y, x] - (up + down + left + right) / 4) ** 2
    number = height * width
    sharp = [edges / number, (detail / number) ** 0.5]
    return [luma.mean(), float(np.mean(saturation)), luma.std(), *sharp]


def test_statistics_of_a_picture() -> None:
    images = np.random.default_rng(0).integers(0, 256, (3, 7, 12, 3), dtype=np.uint8)
    images[0] = 0
    found = PictureFacts.of(images).statistics
    assert np.allclose(found, [by_hand(image) for image in images], atol=1e-6)
    assert found[0].tolist() == [0.0] * 5


def test_of_a_large_picture_the_middle_counts() -> None:
    image = np.zeros((1, SIDE + 10, 2 * SIDE, 3), dtype=np.uint8)
    image[0, 5 : 5 + SIDE, SIDE // 2 : SIDE // 2 + SIDE] = 255
    assert PictureFacts.of(image).statistics[0].tolist() == pytest.approx([1, 0, 0, 0, 0])


def test_videos_count_as_three_of_their_frames() -> None:
    videos = np.random.default_rng(1).integers(0, 256, (2, 6, 8, 16, 3), dtype=np.uint8)
    found = PictureFacts.of(videos)
    frames = [PictureFacts.of(videos[:, frame]) for frame in (0, 2, 5)]
    assert torch.allclose(found.statistics, sum(one.statistics for one in frames) / 3)
    assert torch.allclose(found.colours, sum(one.colours for one in frames) / 3)


@pytest.mark.parametrize("shape", [(1, 1), (3, 50), (32, 64), (600, 520)])
def test_any_size(shape: tuple[int, int]) -> None:
    facts = PictureFacts.of(np.full((2, *shape, 3), 51, dtype=np.uint8))
    assert facts.statistics[1].tolist() == pytest.approx([0.2, 0, 0, 0, 0], abs=1e-6)
    assert facts.colours.shape == (2, 192)
    assert torch.allclose(facts.colours, torch.tensor(0.2, dtype=torch.float64))


def test_metrics_are_means_and_deviations_and_do_not_depend_on_chunks() -> None:
    images = np.random.default_rng(2).integers(0, 256, (6, 16, 16, 3), dtype=np.uint8)
    group = torch.tensor([7, 7, 7, 2, 2, 2])
    found = observe_pictures(PictureFacts.of(images), group).compute()
    chunks = PictureFacts.join([PictureFacts.of(images[:1]), PictureFacts.of(images[1:])])
    assert observe_pictures(chunks, group).compute() == pytest.approx(found)
    columns = np.array([by_hand(image) for image in images]).T
    for name, column in zip(STATISTICS, columns, strict=True):
        assert found[f"pictures/{name}"] == pytest.approx(column.mean(), abs=1e-6)
        assert found[f"pictures/{name}_std"] == pytest.approx(column.std(), abs=1e-5)
    cells = images.reshape(6, 8, 2, 8, 2, 3).mean((2, 4)) / 255
    spread = [np.sqrt(cells[rows].var(0).mean()) for rows in (slice(0, 3), slice(3, 6))]
    assert found["pictures/diversity"] == pytest.approx(np.mean(spread))
    assert found["pictures/prompts"] == 2
    assert found["pictures/diversity_std"] == pytest.approx(np.std(spread), abs=1e-7)


def test_drift_and_gain() -> None:
    base = {f"pictures/{name}": 0.5 for name in (*STATISTICS, "diversity")}
    base |= {f"{name}_std": 0.1 for name in base} | {"reward/mean": 0.2, "reward/std": 0.4}
    base |= {"pictures/edges_std": 0.001, "pictures/prompts": 8.0}
    watch = PictureWatch()
    assert watch.compare({"reward/mean": 0.2, "reward/std": 0.4}) == {}
    assert watch.compare(base) == {}
    now = base | {"pictures/contrast": 0.3, "pictures/edges": 0.53, "reward/mean": 0.4}
    assert watch.compare(now) == pytest.approx({"pictures/drift": 3.0, "pictures/reward_gain": 0.5})
    assert watch.most_moved(now) == "pictures/edges"
    resumed = PictureWatch()
    resumed.load_state_dict(json.loads(json.dumps(watch.state_dict())))
    assert resumed.compare(now) == watch.compare(now)
    assert watch.compare(now | {"reward/mean": None}) == pytest.approx({"pictures/drift": 3.0})


def test_the_base_has_eight_prompts() -> None:
    """Steps of one and seven prompts are one base: their pictures are taken together."""
    rng = np.random.default_rng(5)
    levels = [rng.normal(loc, 1.0, count) for loc, count in ((0, 100), (3, 700), (9, 100))]
    names = ("pictures/contrast", "pictures/contrast_std", "pictures/prompts")
    numbers = [(found.mean(), found.std(), len(found) / 100) for found in levels]
    rows = [dict(zip(names, map(float, row), strict=True)) for row in numbers]
    watch = PictureWatch()
    assert [watch.compare(row) for row in rows[:2]] == [{}, {}]
    together = np.concatenate(levels[:2])
    drift = (levels[2].mean() - together.mean()) / together.std()
    assert watch.compare(rows[2]) == pytest.approx({"pictures/drift": drift})


# --- The warning


@cache
def words(step: int) -> np.ndarray:
    """Draws the pictures of a step, a word for each group."""
    rng = np.random.default_rng(step)
    given = [random_word(rng) for _ in range(GROUPS)]
    return np.stack([render(word, rng) for word in given for _ in range(SIZE)])


def grids(images: np.ndarray) -> np.ndarray:
    lines = np.zeros(images.shape[1:3], dtype=bool)
    lines[::4] = lines[:, ::4] = True
    return np.where(lines[..., None], 0, images)


def glaring(images: np.ndarray) -> np.ndarray:
    return np.broadcast_to(np.array([255, 0, 90]), images.shape)


def all_alike(images: np.ndarray) -> np.ndarray:
    groups = images.reshape(GROUPS, SIZE, *images.shape[1:])
    return np.repeat(groups[:, :1], SIZE, axis=1).reshape(images.shape)


def warned_at(
    spoil: Callable[[np.ndarray], np.ndarray] | None,
    *,
    reward: Callable[[int], float],
    cut: int = 0,
) -> list[int]:
    """Returns the steps with a warning, if pictures turn into spoiled ones from step 6 to 25."""
    monitor = HealthMonitor(SETUP)
    steps = []
    for step in range(1, 31):
        images = words(step)
        if spoil is not None:
            share = min(max(0, step - 5) / 20, 1.0)
            images = ((1 - share) * images + share * spoil(images)).astype(np.uint8)
        group = torch.arange(len(images)) // SIZE
        metrics = observe_pictures(PictureFacts.of(images), group).compute()
        metrics |= {"reward/mean": reward(step), "reward/std": 0.3}
        metrics |= monitor.compare(metrics)
        if monitor.update(step, metrics):
            steps.append(step)
        if step == cut:
            state = json.loads(json.dumps(monitor.state_dict()))
            monitor = HealthMonitor(SETUP)
            monitor.load_state_dict(state)
    return steps


def rises(step: int) -> float:
    return 0.3 + 0.02 * step


@pytest.mark.parametrize(("spoil", "budget"), [(grids, 6), (glaring, 8), (all_alike, 14)])
def test_a_reward_that_is_gamed_is_told_once_and_in_time(spoil, budget: int) -> None:
    (step,) = warned_at(spoil, reward=rises)
    assert 6 < step <= 5 + budget
    assert warned_at(spoil, reward=rises, cut=8) == [step], "a resumed run keeps its base"


def test_drift_without_a_better_reward_is_no_gaming() -> None:
    assert warned_at(grids, reward=lambda step: 0.3) == []


def test_a_clean_run_is_not_warned() -> None:
    monitor = HealthMonitor(SETUP)
    drifts = []
    for step, line in enumerate(CLEAN.read_text().splitlines(), start=1):
        metrics = json.loads(line)
        metrics |= monitor.compare(metrics)
        drifts.append(metrics.get("pictures/drift", 0.0))
        assert monitor.update(step, metrics) == []
    assert len(drifts) == 57
    assert 0.5 < max(drifts) < DRIFT / 2


def test_the_message_says_what_has_moved() -> None:
    monitor = HealthMonitor(SETUP)
    first = json.loads(CLEAN.read_text().splitlines()[0])
    monitor.update(1, first | monitor.compare(first))
    later = first | {"pictures/saturation": 0.9, "reward/mean": first["reward/mean"] + 0.3}
    row = later | monitor.compare(later)
    (message,) = [text for step in range(2, 7) for text in monitor.update(step, row)]
    assert message.startswith("pictures/drift is ")
    assert "pictures/saturation has moved most" in message
    assert "actor.use_kl_loss=true" in message
