"""What every loss of the package does; a new file in flowgrpo_rc/losses is tested by itself."""

import math
from inspect import signature
from pathlib import Path

import pytest
import torch
from support.gaussian_losses import SIGMAS
from torch import Tensor

from flowgrpo_rc import DiffusionLossConfig, TokenLossConfig
from flowgrpo_rc.core.transition import GaussianSteps
from flowgrpo_rc.losses.base import DiffusionLoss, ImageLoss, PolicyLoss, TokenLoss
from flowgrpo_rc.losses.find import package_losses

DIFFUSION = sorted(package_losses(DiffusionLoss))
TOKEN = sorted(package_losses(TokenLoss))
EVERY = [*(("diffusion", name) for name in DIFFUSION), *(("token", name) for name in TOKEN)]


def drawn(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Current and old log-probs, and advantages, [5, 3] float64."""
    source = torch.Generator().manual_seed(seed)
    old, move, advantages = torch.randn(3, 5, 3, generator=source, dtype=torch.float64)
    return old + 1e-5 * move, old, advantages


def steps(kl: Tensor) -> GaussianSteps:
    dt = torch.tensor(SIGMAS).double().diff().expand(5, 3)
    return GaussianSteps(torch.full_like(kl, 0.5), dt, kl)


def evaluate(
    kind: str, name: str, log_probs: Tensor, old: Tensor, advantages: Tensor, keep_mask: Tensor
) -> PolicyLoss:
    if kind == "token":
        return TokenLossConfig(loss_mode=name).loss()(log_probs, old, advantages, keep_mask)
    loss = DiffusionLossConfig(loss_mode=name).loss()
    kl = torch.full_like(old, 1e-11)
    return loss(log_probs, old, advantages, keep_mask, steps(kl) if loss.needs_means else None)


def test_the_losses_that_are_there() -> None:
    assert {"flow_dppo", "flow_grpo", "grpo_guard"} <= set(DIFFUSION)
    assert {"gspo", "ppo_clip"} <= set(TOKEN)


@pytest.mark.parametrize("base", [ImageLoss, TokenLoss])
def test_its_options_are_documented(base: type) -> None:
    """A shared option is a key of docs/configuration.md; one of its own stands with the losses."""
    page = (Path(__file__).parents[2] / "docs" / "rollout_correction.md").read_text()
    losses = page.split("## Losses")[1].split("\n## ")[0]
    for name, loss in package_losses(base).items():
        for word in (name, *signature(loss).parameters):
            assert f"`{word}`" in losses


@pytest.mark.parametrize(("kind", "name"), EVERY)
def test_a_step_that_is_not_kept_has_neither_value_nor_gradient(kind: str, name: str) -> None:
    now, old, advantages = drawn()
    keep_mask = torch.ones(5, 3, dtype=torch.bool)
    keep_mask[1, 2] = keep_mask[4, 0] = False
    broken = now.clone()
    broken[1, 2] = math.inf
    broken[4, 0] = math.nan
    results = []
    for log_probs in (now, broken):
        leaf = log_probs.requires_grad_()
        actual = evaluate(kind, name, leaf, old, advantages, keep_mask)
        assert actual.values.shape == (5, 3)
        assert actual.values[~keep_mask].tolist() == [0, 0]
        actual.values.sum().backward()
        assert leaf.grad is not None
        assert leaf.grad[~keep_mask].tolist() == [0, 0]
        results.append((actual.values.detach(), leaf.grad, actual.metrics.compute()))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert results[0][2] == results[1][2]
    assert "clip_fraction" in results[0][2]


@pytest.mark.parametrize(("kind", "name"), EVERY)
def test_what_has_not_moved_has_the_direction_of_the_policy_gradient(kind: str, name: str) -> None:
    _, old, advantages = drawn()
    leaf = old.clone().requires_grad_()
    actual = evaluate(kind, name, leaf, old, advantages, torch.ones_like(old).bool())
    actual.values.sum().backward()
    assert leaf.grad is not None
    assert torch.equal(leaf.grad.sign(), -advantages.sign())
    assert actual.metrics.compute()["clip_fraction"] == 0


@pytest.mark.parametrize("name", DIFFUSION)
def test_its_bound_is_one_of_its_options(name: str) -> None:
    """A calibration writes the option, so it has to be a key that the loss reads."""
    loss = DiffusionLossConfig(loss_mode=name, clip_ratio=3e-4, kl_threshold=2e-6).loss()
    mismatch = 1e-4 * drawn()[2]
    bound = loss.bound(mismatch, steps(mismatch**2), convention="gaussian")
    if bound is None:
        assert loss.clip_band is None
        return
    assert bound.option in signature(type(loss)).parameters
    assert bound.value == vars(loss)[bound.option] != bound.reference > 0
    assert bound.values.shape == mismatch.shape
    assert bound.values.dtype == torch.float64
    assert bound.is_kl == (bound.values.amin() >= 0)
    own_ratio = loss.clip_band is not None
    assert own_ratio == (bound.what == "the mismatch") == torch.equal(bound.values, mismatch)


def test_only_a_band_on_the_ratio_of_a_step_is_one() -> None:
    for name, band in (("flow_grpo", 3e-4), ("grpo_guard", None), ("flow_dppo", None)):
        assert DiffusionLossConfig(loss_mode=name, clip_ratio=3e-4).loss().clip_band == band
    widths = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.3}
    for name, band in (("ppo_clip", 0.1), ("gspo", None)):
        assert TokenLossConfig(loss_mode=name, **widths).loss().clip_band == band
