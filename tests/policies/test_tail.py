"""The steps behind the window: fewer of them, and of second order."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from support.image_rollouts import make_spec, sample_images, trained_lora
from torch import Tensor

from flowgrpo_rc.core.schedule import kept_steps
from flowgrpo_rc.models.base import FlowModel, Schedule
from flowgrpo_rc.policies.flow import FlowPolicy, SdeWindow, sample_trajectory

SIGMAS = torch.tensor([1.0, 0.9, 0.75, 0.6, 0.4, 0.3, 0.1, 0.0], dtype=torch.float64)
SCHEDULE = Schedule(SIGMAS, SIGMAS[:-1] * 1000)


def walk(window: list[list[int]], tail_start: int, tail: str = "ab2") -> tuple[Tensor, Tensor]:
    """Returns the states behind the window, and the final ones, for a velocity linear in sigma."""
    spec = replace(make_spec("sde", 1.0), tail=tail, tail_start=tail_start)
    found = sample_trajectory(
        lambda x, timesteps: (2 + 3 * timesteps / 1000).reshape(-1, 1).expand_as(x),
        SCHEDULE,
        torch.ones((len(window), 4), dtype=torch.float64),
        spec,
        SdeWindow(
            torch.tensor(window),
            lambda step: torch.full((len(window), 4), 0.5, dtype=torch.float64),
        ),
    )
    return found.window_latents[:, -1], found.final


def exact(state: Tensor, sigma: float) -> Tensor:
    """Returns the solution at sigma 0 of the ODE that starts at a state."""
    return state - (2 * sigma + 1.5 * sigma**2)


def euler(state: Tensor, sigmas: Tensor) -> Tensor:
    """Returns what Euler steps make of a state."""
    for sigma, following in itertools.pairwise(sigmas):
        state = state + (following - sigma) * (2 + 3 * sigma)
    return state


def test_second_order_steps_are_exact_for_a_velocity_that_is_linear_in_sigma():
    behind, final = walk([[0, 1]], tail_start=3)
    at_3 = euler(behind, SIGMAS[2:4])  # not yet the tail
    torch.testing.assert_close(final, exact(at_3, 0.6), rtol=0, atol=1e-12)


def test_the_step_behind_the_noise_is_an_euler_step():
    behind, final = walk([[1, 2]], tail_start=3)
    after_one = euler(behind, SIGMAS[3:5])
    torch.testing.assert_close(final, exact(after_one, 0.4), rtol=0, atol=1e-12)


def test_each_sample_follows_its_own_window():
    _, together = walk([[0, 1], [1, 2]], tail_start=3)
    for row, window in enumerate(([[0, 1]], [[1, 2]])):
        _, alone = walk(window, tail_start=3)
        assert torch.equal(together[row], alone[0])


def test_the_tail_is_of_first_order_by_default():
    behind, final = walk([[0, 1]], tail_start=3, tail="euler")
    torch.testing.assert_close(final, euler(behind, SIGMAS[2:]), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("tail_steps", "kept"),
    [
        (None, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
        (5, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
        (9, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
        (4, [0, 1, 2, 3, 4, 5, 6, 7, 8]),
        (2, [0, 1, 2, 3, 4, 5, 7]),
        (1, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_a_shorter_tail_leaves_out_the_last_step_first(tail_steps, kept):
    assert kept_steps(10, 5, tail_steps) == kept


@pytest.mark.parametrize("num_steps", [5, 28, 50])
def test_a_tail_of_any_length_has_different_steps(num_steps):
    for start in range(num_steps):
        for count in range(1, num_steps - start + 1):
            kept = kept_steps(num_steps, start, count)
            assert kept == sorted(set(kept))
            assert len(kept) == start + count


def test_the_log_probs_of_the_window_do_not_depend_on_the_tail(model: FlowModel):
    transformer = trained_lora(model)
    stock = make_spec("sde", 1.0)
    short = replace(stock, tail="ab2", tail_start=3, tail_steps=1)
    windows = [[0, 1], [1, 2]]
    one, images = sample_images(model, transformer, stock, windows)
    other, other_images = sample_images(model, transformer, short, windows)
    assert torch.equal(one.all_latents, other.all_latents)
    assert torch.equal(one.rollout_log_probs, other.rollout_log_probs)
    assert (images != other_images).any()
    assert len(other.sigmas) == 5
    assert len(one.sigmas) == 6
    assert torch.equal(FlowPolicy(model, transformer).log_probs(other, 4), other.rollout_log_probs)
