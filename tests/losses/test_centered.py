"""The centered log-ratio against float64 formulas: both modes, every loss, every kind of step."""

import math
from typing import NamedTuple

import pytest
import torch
from support.gaussian_losses import movement, three_steps, transition_of
from support.image_rollouts import KINDS
from support.oracles import Clip, clipped
from torch import Tensor

from flowgrpo_rc import RolloutCorrectionConfig, diffusion_loss
from flowgrpo_rc.batch import DiffusionBatch
from flowgrpo_rc.core.kl import gaussian_kl
from flowgrpo_rc.core.transition import GaussianSteps, centered_log_ratio, log_prob
from flowgrpo_rc.losses.config import DiffusionLossConfig, LossConfig

CLIP = {"flow_grpo": 0.01, "grpo_guard": 0.002}
KL_THRESHOLD = 2e-3
LOSSES = ("flow_grpo", "grpo_guard", "flow_dppo")


class Case(NamedTuple):
    """Six samples of three steps. The rollout, the old and the current policy have means of their
    own, the first two by far; all float64.
    """

    noise: Tensor
    std: Tensor
    dt: Tensor
    rollout_mean: Tensor
    old_mean: Tensor
    following: Tensor
    direction: Tensor
    batch: DiffusionBatch

    def mean(self, theta: Tensor) -> Tensor:
        return self.old_mean + theta[:, :, None, None] * self.direction

    def now(self, mean: Tensor, anchor: Tensor) -> tuple[Tensor, GaussianSteps]:
        """Computes log-probs and steps [B, T] of a policy of this mean, as the policy does."""
        rows = []
        for t in range(3):
            step = transition_of(mean[:, t], self.std[:, t])
            rollout = self.rollout_mean[:, t]
            following = self.following[:, t]
            value = log_prob(step, following)
            kl = gaussian_kl(step.mean, anchor[:, t], step.std)
            rows.append((value, kl, centered_log_ratio(step, rollout, following)))
        log_probs, kl, centered = (torch.stack(column, 1) for column in zip(*rows, strict=True))
        return log_probs, GaussianSteps(self.std, self.dt, kl, centered)


def make_case(kind: str, *, bypass: bool, gap: float = 0.3) -> Case:
    given = three_steps(kind)
    source = torch.Generator().manual_seed(7)
    shape = given.old_mean.shape
    shift, direction = gap * torch.randn(2, *shape, generator=source, dtype=torch.float64)
    rollout_mean = given.old_mean
    std = given.std[:, :, None, None]
    old_mean = rollout_mean if bypass else rollout_mean + std * shift
    noise = (given.following - rollout_mean) / std
    case = Case(
        noise=noise,
        std=given.std,
        dt=given.dt,
        rollout_mean=rollout_mean,
        old_mean=old_mean,
        following=given.following,
        direction=std * direction,
        batch=given.batch,
    )
    old, facts = case.now(old_mean, old_mean)
    batch = given.batch
    if bypass:
        batch = batch.replace(old_log_probs=batch.rollout_log_probs)
    else:
        batch = batch.with_old(old, old_mean, facts.centered)
    return case._replace(batch=batch)


def settings(loss_mode: str, **correction: object) -> LossConfig:
    bound = {"kl_threshold": KL_THRESHOLD}
    if loss_mode != "flow_dppo":
        bound = {"clip_ratio": CLIP[loss_mode]}
    return LossConfig(
        rollout_correction=RolloutCorrectionConfig(centered=True, **correction),
        diffusion_loss=DiffusionLossConfig(loss_mode=loss_mode, **bound),
    )


def clip_of(loss_mode: str) -> Clip:
    return Clip(CLIP[loss_mode], CLIP[loss_mode])


def step_loss(case: Case, loss_mode: str, mean: Tensor, b: int, t: int, advantage: float) -> Tensor:
    """The loss of one step, by the noise that was drawn and the distance from the old policy."""
    std = case.std[b, t]
    distance = mean[b, t] - case.old_mean[b, t]
    log_ratio = (case.noise[b, t] * distance).sum() / distance.numel() / std
    if loss_mode == "grpo_guard":
        ratio = torch.exp(log_ratio * std)
        return clipped(ratio, advantage, clip_of(loss_mode)) / -case.dt[b, t]
    if loss_mode == "flow_grpo":
        return clipped(torch.exp(log_ratio), advantage, clip_of(loss_mode))
    far = (distance**2).mean() / (2 * std**2) > KL_THRESHOLD
    if far and advantage * log_ratio > 0:
        return 0 * log_ratio
    return -advantage * torch.exp(log_ratio)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bypass", [True, False], ids=["bypass", "decoupled"])
@pytest.mark.parametrize("loss_mode", LOSSES)
def test_value_and_gradient_are_those_of_the_formula(
    kind: str, bypass: bool, loss_mode: str
) -> None:
    case = make_case(kind, bypass=bypass)
    actual = movement(0.2).requires_grad_()
    log_probs, gaussian = case.now(case.mean(actual), case.old_mean)
    value, metrics = diffusion_loss(
        settings(loss_mode, bypass_mode=bypass), log_probs, case.batch, gaussian
    )
    value.backward()

    expect = movement(0.2).requires_grad_()
    advantages = case.batch.advantages
    assert advantages is not None
    mean = case.mean(expect)
    terms = [
        step_loss(case, loss_mode, mean, b, t, advantages[b, t].item())
        for b in range(6)
        for t in range(3)
    ]
    total = torch.stack(terms).mean()
    total.backward()
    assert value.item() == pytest.approx(total.item(), rel=1e-10)
    assert torch.allclose(actual.grad, expect.grad, rtol=1e-9, atol=1e-14)
    # Some steps are held back and some are not. What is reported is the KL, all the same.
    values = metrics.compute()
    assert 0 < values["clip_fraction"] < 1
    assert loss_mode == "flow_grpo" or values["step_kl_max"] > 0


@pytest.mark.parametrize("kind", KINDS)
def test_reinforce_weighs_the_score_of_the_drawn_noise(kind: str) -> None:
    case = make_case(kind, bypass=True, gap=0.05)
    theta = movement(0.05).requires_grad_()
    log_probs, gaussian = case.now(case.mean(theta), case.old_mean)
    reinforced = settings("flow_grpo", bypass_mode=True, loss_type="reinforce", rollout_is="token")
    # REINFORCE has no clip; its default is not given twice.
    reinforced.diffusion_loss.clip_ratio = DiffusionLossConfig.clip_ratio
    value, _ = diffusion_loss(reinforced, log_probs, case.batch, gaussian)
    value.backward()
    assert case.batch.rollout_log_probs is not None
    weights = torch.exp(log_probs.detach() - case.batch.rollout_log_probs)
    drawn = (case.noise * case.direction).flatten(2).mean(2) / case.std
    expect = -case.batch.advantages * weights * drawn / 18
    assert torch.allclose(theta.grad, expect, rtol=1e-10, atol=1e-16)


@pytest.mark.parametrize("bypass", [True, False], ids=["bypass", "decoupled"])
@pytest.mark.parametrize("loss_mode", LOSSES)
def test_a_rejected_step_is_selected_out_even_if_it_is_infinite(
    bypass: bool, loss_mode: str
) -> None:
    """A mean that is not finite leaves its step out, too: its log-probs may be finite."""
    case = make_case("sde", bypass=bypass)
    keep_mask = torch.ones(6, 3, dtype=torch.bool)
    keep_mask[2, 1] = False
    hole = torch.where(keep_mask, 0.0, math.inf)
    results = []
    for rejected, broken, off in ((True, 0.0, 0.0), (True, hole, hole), (False, 0.0, 0.0 * hole)):
        batch = case.batch.replace(rejection_mask=keep_mask) if rejected else case.batch
        theta = movement(0.2).requires_grad_()
        log_probs, gaussian = case.now(case.mean(theta), case.old_mean)
        gaussian = gaussian._replace(centered=gaussian.centered + off)
        config = settings(loss_mode, bypass_mode=bypass)
        value, _ = diffusion_loss(config, log_probs + broken, batch, gaussian)
        value.backward()
        results.append((value.item(), theta.grad))
    for value, gradient in results:
        assert value == results[0][0]
        assert torch.equal(gradient, results[0][1])
        assert gradient[2, 1] == 0
        assert gradient.count_nonzero() > 3


def test_metrics_of_the_correction_keep_the_log_probs() -> None:
    case = make_case("sde", bypass=True)
    log_probs, gaussian = case.now(case.mean(movement(0.2)), case.old_mean)
    actual = []
    for centered in (False, True):
        config = settings("flow_grpo", bypass_mode=True, rollout_is="token")
        config.rollout_correction.centered = centered
        _, metrics = diffusion_loss(config, log_probs, case.batch, gaussian)
        actual.append({k: v for k, v in metrics.compute().items() if k.startswith("rollout_corr/")})
    assert actual[0] == actual[1]
    assert len(actual[0]) > 10


def test_a_batch_without_means_or_without_a_centered_old_policy_is_refused() -> None:
    case = make_case("sde", bypass=False)
    log_probs, gaussian = case.now(case.mean(movement()), case.old_mean)
    config = settings("flow_grpo")
    for given in (None, gaussian._replace(centered=None)):
        with pytest.raises(ValueError, match=r"centered=true.*prev_sample_mean"):
            diffusion_loss(config, log_probs, case.batch, given)
    with pytest.raises(ValueError, match=r"bypass_mode=false.*old_centered"):
        diffusion_loss(config, log_probs, case.batch.replace(old_centered=None), gaussian)
