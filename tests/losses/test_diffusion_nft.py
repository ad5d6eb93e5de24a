"""DiffusionNFT against its formula, written anew with numpy in the space of clean samples."""

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from flowgrpo_rc import DiffusionLossConfig
from flowgrpo_rc.losses.base import DIFFUSION_KEY, Velocities
from flowgrpo_rc.losses.diffusion_nft import DiffusionNFT


class Drawn(NamedTuple):
    clean: np.ndarray
    noise: np.ndarray
    current: np.ndarray
    old: np.ndarray
    sigma: np.ndarray
    advantages: np.ndarray

    def velocities(self) -> Velocities:
        arrays = (self.current, self.old, self.noise - self.clean, self.sigma)
        actual = Velocities(*map(torch.from_numpy, arrays))
        actual.current.requires_grad_()
        return actual


@pytest.fixture
def drawn() -> Drawn:
    """Three samples of 2 x 4 elements at two noise levels, in float64."""
    source = np.random.default_rng(5)
    shape = (3, 2, 2, 4)
    old = source.normal(size=shape)
    return Drawn(
        clean=source.normal(size=shape),
        noise=source.normal(size=shape),
        current=old + 0.1 * source.normal(size=shape),
        old=old,
        sigma=np.array([[0.9, 0.3], [1.0, 0.02], [0.5, 0.7]]),
        advantages=np.array([[1.0, 1.0], [-0.4, -0.4], [0.2, 0.2]]),
    )


def expected(d: Drawn, beta: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns loss and slope of each element of the velocity, from predictions of clean samples."""
    t = d.sigma[:, :, None, None]
    noised = (1 - t) * d.clean + t * d.noise
    r = (d.advantages / 2 + 0.5)[:, :, None, None]
    value = np.zeros_like(d.sigma)
    slope = np.zeros_like(d.clean)
    for share, sign in ((r, 1), (1 - r, -1)):
        velocity = d.old + sign * beta * (d.current - d.old)
        error = noised - t * velocity - d.clean
        weight = np.abs(error).mean(axis=(2, 3), keepdims=True).clip(1e-5)
        value += (share * error**2 / weight / beta).mean(axis=(2, 3))
        # d error / d current = -t sign beta, and the weight is a constant
        slope += share * 2 * error / weight * (-t * sign) / 8
    return value, slope


@pytest.mark.parametrize("beta", [1.0, 0.1, 2.5])
def test_value_and_slope(drawn: Drawn, beta: float) -> None:
    velocities = drawn.velocities()
    actual = DiffusionNFT(beta=beta)(velocities, torch.from_numpy(drawn.advantages))
    value, slope = expected(drawn, beta)
    np.testing.assert_allclose(actual.values.detach().numpy(), value, rtol=1e-12)
    actual.values.sum().backward()
    assert velocities.current.grad is not None
    np.testing.assert_allclose(velocities.current.grad.numpy(), slope, rtol=1e-11, atol=1e-14)
    metrics = actual.metrics.compute()
    moved = ((drawn.current - drawn.old) ** 2).mean()
    np.testing.assert_allclose(metrics["old_deviation"], moved, rtol=1e-12)


def test_a_perfect_prediction_has_a_finite_slope() -> None:
    zero = torch.zeros(1, 1, 4, dtype=torch.float64)
    velocities = Velocities(zero.clone().requires_grad_(), zero, zero, torch.ones(1, 1))
    DiffusionNFT()(velocities, torch.ones(1, 1)).values.sum().backward()
    assert velocities.current.grad is not None
    assert torch.equal(velocities.current.grad, zero)


@pytest.mark.parametrize(
    ("options", "decays"),
    [
        ({}, {0: 0.0, 1: 0.001, 250: 0.25, 500: 0.5, 9000: 0.5}),
        (
            {"old_decay_start": 75, "old_decay_rate": 0.0075, "old_decay_max": 0.999},
            {0: 0.0, 75: 0.0, 76: 0.0075, 175: 0.75, 208: 0.9975, 209: 0.999},
        ),
        ({"old_decay_rate": 0.0}, {0: 0.0, 500: 0.0}),
        ({"old_interval": 4}, {6: 1.0, 8: 0.008}),
    ],
)
def test_the_published_decays(options: dict[str, Any], decays: dict[int, float]) -> None:
    loss = DiffusionNFT(**options)
    assert {updates: loss.old_decay(updates) for updates in decays} == pytest.approx(decays)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"beta": 0.0}, "beta=0.0"),
        ({"times": 0}, "times=0"),
        ({"old_decay_rate": -1.0}, "old_decay_rate=-1.0"),
        ({"old_decay_max": 1.0}, "old_decay_max=1.0"),
        ({"old_decay_start": -1}, "old_decay_start=-1"),
        ({"old_interval": 0}, "old_interval=0"),
        ({"betas": 1.0}, "betas: unknown option"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], words: str) -> None:
    section = DiffusionLossConfig(loss_mode="diffusion_nft", options=options)
    with pytest.raises(ValueError, match=rf"{DIFFUSION_KEY}.*{words}"):
        section.validate()
    clipped = DiffusionLossConfig(loss_mode="diffusion_nft", clip_ratio=1e-3)
    with pytest.raises(ValueError, match=r"clip_ratio=0.001 has no effect.*diffusion_nft"):
        clipped.validate()
