"""The estimators k1, k2 and k3, and the exact KL of two Gaussians."""

import math

import pytest
import torch
from support.image_rollouts import KINDS
from torch.distributions import Normal, kl_divergence

from flowgrpo_rc.core.kl import gaussian_kl, k1, k2, k3
from flowgrpo_rc.core.transition import transition


@pytest.mark.parametrize("scale", [1e-8, 1e-6, 1e-4, 1.0])
def test_kl_estimators(scale):
    x = scale * torch.randn(100, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert torch.equal(k1(x), -x)
    torch.testing.assert_close(k2(x), x * x / 2, rtol=1e-15, atol=0)
    series = sum(x**n / float(math.factorial(n)) for n in range(2, 30))
    torch.testing.assert_close(k3(x), series, rtol=1e-12, atol=1e-15 * scale)
    assert (k3(x) >= 0).all()
    assert (k3(x.float()) >= 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_gaussian_kl_is_the_kl_of_the_two_gaussians(kind: str) -> None:
    source = torch.Generator().manual_seed(0)
    x, v, other = (torch.randn(3, 2, 4, 4, generator=source, dtype=torch.float64) for _ in range(3))
    sigma = torch.tensor([1.0, 0.8, 0.3]).double()
    sigma_next = torch.tensor([0.9, 0.6, 0.1]).double()
    settings = {"kind": kind, "noise_level": 0.7, "sigma_max": 0.9}
    one, two = (transition(x, velocity, sigma, sigma_next, **settings) for velocity in (v, other))
    exact = kl_divergence(Normal(one.mean, one.std), Normal(two.mean, two.std)).flatten(1).mean(1)
    torch.testing.assert_close(gaussian_kl(one.mean, two.mean, one.std), exact, rtol=1e-13, atol=0)
    assert torch.equal(gaussian_kl(one.mean, one.mean, one.std), torch.zeros(3).double())
