"""The toy of docs/troubleshooting.md shows what the page says, and the page has its numbers."""

from __future__ import annotations

import re

import clip_pull
import pytest
import torch
from support.documented import ROOT
from torch import Tensor

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
Rows = dict[tuple[int, bool], list[list[float]]]


@pytest.fixture(scope="module")
def gradients() -> Rows:
    return {
        key: rows for bits in clip_pull.ENGINES for key, rows in clip_pull.compare(bits).items()
    }


@pytest.fixture(scope="module")
def tight() -> dict[int, tuple[Tensor, Tensor, Tensor]]:
    return {bits: clip_pull.train(bits, "tight band", 120) for bits in clip_pull.ENGINES}


def numbers(first: str) -> list[float]:
    """Returns the numbers of the page's table row that begins with a cell."""
    row = next(line for line in PAGE.splitlines() if line.startswith(f"| {first} |"))
    return [float(cell.strip(" *")) for cell in row.split("|")[2:-1]]


def end(rewards: Tensor) -> float:
    return rewards[-5:].mean().item()


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("bits", [8, 6])
def test_random_advantages_pull_below_the_mismatch_and_not_above(
    gradients: Rows, bits: int, centered: bool
) -> None:
    """Theory: the pull is proportional to exp(-(c / std)^2 / 2), whatever the mismatch is."""
    rows = dict(zip(clip_pull.WIDTHS, gradients[bits, centered], strict=True))
    pull = {width: length for width, (length, _, _) in rows.items()}
    assert pull[0.03] > 1.5
    for width in (0.3, 1, 2):
        expected = torch.tensor(-(width**2) / 2).exp().item()
        assert pull[width] / pull[0.03] == pytest.approx(expected, abs=0.06)
    assert pull[4] < 0.02
    assert pull[30] == 0
    assert all(rows[width][1] > 0.9 for width in (0.03, 0.1, 0.3, 1)), "it is towards the rollout"


def test_the_centered_ratio_with_a_wide_band_has_the_true_direction(gradients: Rows) -> None:
    wide, narrow = clip_pull.WIDTHS.index(4), clip_pull.WIDTHS.index(0.1)
    cosine = {key: rows[wide][2] for key, rows in gradients.items()}
    assert cosine[8, True] > 0.99
    assert cosine[6, True] > 0.99
    assert 0.85 < cosine[8, False] < 0.98
    assert cosine[6, False] < 0.75
    assert all(rows[narrow][2] < 0.45 for rows in gradients.values())


def test_the_page_has_these_gradients(gradients: Rows) -> None:
    for name in ("0.03", "0.3", "1", "4"):
        row = clip_pull.WIDTHS.index(float(name))
        lengths = [gradients[bits, False][row][0] for bits in (8, 6)]
        order = [(8, False), (8, True), (6, False), (6, True)]
        cosines = [gradients[key][row][2] for key in order]
        assert numbers(name) == pytest.approx([*lengths, *cosines], abs=0.02)


def test_the_tight_band_collapses_while_the_log_ratio_is_tiny(
    tight: dict[int, tuple[Tensor, Tensor, Tensor]],
) -> None:
    for rewards, last, band in tight.values():
        assert (rewards[-5:].mean(0) < rewards[0]).all(), "every run ends below its start"
        assert rewards.mean(1).max() > rewards[0].mean() + 0.03, "after it had risen"
        assert (last.abs() > band).double().mean() > 0.88
    last = tight[8][1]
    assert last.std() < 0.005
    assert -last.mean() < 2e-4


def test_what_helps_helps_and_the_page_has_these_rewards(
    tight: dict[int, tuple[Tensor, Tensor, Tensor]],
) -> None:
    found = {arm: clip_pull.train(8, arm, 40)[0] for arm in clip_pull.ARMS}
    good = {arm: end(rewards) for arm, rewards in found.items() if arm != "tight band"}
    assert min(good.values()) > 0.66
    assert end(found["tight band"]) < 0.62
    assert numbers("tight band") == pytest.approx([end(tight[8][0]), end(tight[6][0])], abs=0.06)
    centered = end(clip_pull.train(6, "wide band, centered ratio", 120)[0])
    assert numbers("wide band, centered ratio")[1] == pytest.approx(centered, abs=0.03)


def test_it_prints_and_draws_everything(
    tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path_factory.mktemp("toy") / "figures"
    clip_pull.main(["--out", str(out), "--iterations", "2"])
    figures = {path.name for path in out.iterdir()}
    assert figures == set(re.findall(r"figures/(collapse_\w+\.svg)", PAGE))
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 2 + 4 * len(clip_pull.WIDTHS) + 2 * len(clip_pull.ARMS)
