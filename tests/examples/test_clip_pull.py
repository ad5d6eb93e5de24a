"""The toy of docs/troubleshooting.md shows what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import clip_pull
import pytest
import torch
from support.documented import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
Rows = dict[tuple[int, bool], list[list[float]]]


@pytest.fixture(scope="module")
def gradients() -> Rows:
    return {
        key: rows for bits in clip_pull.ENGINES for key, rows in clip_pull.compare(bits).items()
    }


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_centered_ratio_with_a_wide_band_has_the_true_direction(gradients: Rows) -> None:
    wide, narrow = clip_pull.WIDTHS.index(4), clip_pull.WIDTHS.index(0.1)
    cosine = {key: rows[wide][2] for key, rows in gradients.items()}
    assert cosine[8, True] > 0.99
    assert cosine[6, True] > 0.99
    assert 0.85 < cosine[8, False] < 0.98
    assert cosine[6, False] < 0.75
    assert all(rows[narrow][2] < 0.45 for rows in gradients.values())


@pytest.mark.slow
def test_the_tight_band_collapses_while_the_log_ratio_is_tiny() -> None:
    rewards, last, band = clip_pull.train(8, "tight band", 120)
    assert (rewards[-5:].mean(0) < rewards[0]).all(), "every run ends below its start"
    assert rewards.mean(1).max() > rewards[0].mean() + 0.03, "after it had risen"
    assert (last.abs() > band).double().mean() > 0.88
    assert last.std() < 0.005
    assert -last.mean() < 2e-4


@pytest.mark.slow
def test_it_prints_and_draws_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "figures"
    clip_pull.main(["--out", str(out), "--iterations", "2"])
    figures = {path.name for path in out.iterdir()}
    assert figures == set(re.findall(r"figures/(collapse_\w+\.svg)", PAGE))
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 2 + 4 * len(clip_pull.WIDTHS) + 2 * len(clip_pull.ARMS)
