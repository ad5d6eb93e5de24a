"""GRPO-Guard: a ratio without bias, one for each sample and step, in both modes."""

from __future__ import annotations

import math

import pytest
import torch
from support.gaussian_losses import (
    BYPASS,
    DECOUPLED,
    Steps,
    loss_config_of,
    movement,
    three_steps,
    value_and_gradient,
)
from support.image_rollouts import KINDS, WINDOWS, make_spec, sample_images, trained_lora
from support.modes import mode_of
from support.oracles import Clip, clipped
from support.runs import Train
from torch import Tensor
from torch.distributions import Normal

from flowgrpo_rc import RolloutCorrectionConfig, diffusion_loss
from flowgrpo_rc.algorithms.policy_gradient.images import DiffusionObjective
from flowgrpo_rc.core.metrics import MetricBag
from flowgrpo_rc.core.transition import GaussianSteps
from flowgrpo_rc.models.base import FlowModel
from flowgrpo_rc.models.lora import lora_parameters
from flowgrpo_rc.policies.flow import FlowPolicy


def guard_ratio(given: Steps, theta: Tensor, b: int, t: int) -> Tensor:
    """Computes the same ratio by the paper's closed form.

    It is exp(mean_D[(mean - old_mean) (x' - old_mean)] / std).
    """
    old = given.old_mean[b, t]
    shift = given.mean(theta)[b, t] - old
    return torch.exp((shift * (given.following[b, t] - old)).mean() / given.std[b, t])


# --- The formula


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("correction", [DECOUPLED, BYPASS], ids=["decoupled", "bypass"])
def test_loss_and_gradient_are_those_of_the_closed_form(
    kind: str, correction: RolloutCorrectionConfig
) -> None:
    given = three_steps(kind)
    theta = movement()
    value, gradient, metrics = value_and_gradient(
        loss_config_of("grpo_guard", correction), given, theta
    )
    leaf = theta.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    held = 0
    for b in range(6):
        for t in range(3):
            ratio = guard_ratio(given, leaf, b, t)
            a = given.batch.advantages[b, t].item()
            held += abs(ratio.item() - 1) > 0.01
            total = total + clipped(ratio, a, Clip(0.01, 0.01)) / -given.dt[b, t] / 18
    (expect,) = torch.autograd.grad(total, leaf)
    assert value == pytest.approx(total.item(), rel=1e-12)
    torch.testing.assert_close(gradient, expect, rtol=1e-9, atol=1e-13)
    assert 0 < torch.count_nonzero(gradient) < 18
    assert metrics["clip_fraction"] == held / 18


def test_at_equal_means_there_is_no_bias_and_the_ratio_is_one() -> None:
    for kind in KINDS:
        metrics = value_and_gradient(
            loss_config_of("grpo_guard"), three_steps(kind), torch.zeros(6, 3).double()
        )[2]
        assert metrics["ratio_mean"] == 1
        assert metrics["ratio_std"] == 0
        assert metrics["step_kl_max"] == 0


def test_the_log_ratio_has_no_bias_and_flow_grpo_s_has() -> None:
    """Averaged over noise and its opposite, Guard's log-ratios cancel; plain ones leave minus
    the KL.
    """
    given = three_steps()
    theta = movement(0.5)
    opposite = given._replace(following=2 * given.old_mean - given.following)
    logs = []
    for one in (given, opposite):
        old = (
            Normal(one.old_mean, one.std[:, :, None, None])
            .log_prob(one.following)
            .flatten(2)
            .mean(2)
        )
        log_probs, gaussian = one.now(theta)
        logs.append((log_probs - old, (log_probs - old + gaussian.kl) * gaussian.std))
    plain, guard = (sum(column) / 2 for column in zip(*logs, strict=True))
    torch.testing.assert_close(guard, torch.zeros_like(guard), rtol=0, atol=1e-14)
    torch.testing.assert_close(plain, -given.now(theta)[1].kl, rtol=1e-9, atol=0)


def test_the_correction_of_a_sample_is_its_own() -> None:
    """A sample far off its old mean changes nothing for the others, and samples one by one add
    up to the loss.
    """
    given = three_steps()
    theta = movement()
    far = theta.clone()
    far[0] = 30.0
    one, two = (
        value_and_gradient(loss_config_of("grpo_guard"), given, values)[1]
        for values in (theta, far)
    )
    assert torch.equal(one[1:], two[1:])
    parts = []
    for b in range(6):
        alone = Steps(given.batch.rows(b, b + 1), *(tensor[b : b + 1] for tensor in given[1:]))
        parts.append(value_and_gradient(loss_config_of("grpo_guard"), alone, theta[b : b + 1])[1])
    torch.testing.assert_close(torch.cat(parts) / 6, one, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("steps_per_call", [1, 3])
def test_every_sample_and_step_has_a_ratio_of_its_own(steps_per_call: int) -> None:
    """Its shape is (B, 1) or (B, T), never an outer product of the batch."""
    given = three_steps()
    log_probs, gaussian = given.now(movement())
    part = slice(0, steps_per_call)
    batch = given.batch if steps_per_call == 3 else given.batch.step(0)
    cut = GaussianSteps(*(tensor[:, part] for tensor in gaussian[:3]))
    terms = DiffusionObjective(loss_config_of("grpo_guard")).terms(log_probs[:, part], batch, cut)
    assert terms.share.shape == (6, steps_per_call)
    assert terms.parts[0] == 6 * steps_per_call
    assert terms.total.ndim == 0


def test_rejected_steps_are_selected_out() -> None:
    given = three_steps()
    theta = movement(0.01)
    mask = torch.ones(6, 3, dtype=torch.bool)
    mask[2] = False
    mask[4, 1] = False
    batch = given.batch.replace(
        rejection_mask=mask, rollout_is_weights=torch.full((6, 3), 2.0).double()
    )
    plain = value_and_gradient(loss_config_of("grpo_guard"), given, theta)[1]
    broken = theta.clone()
    broken[2] = math.inf
    _, gradient, metrics = value_and_gradient(loss_config_of("grpo_guard"), given, theta, batch)
    torch.testing.assert_close(gradient, torch.where(mask, 2 * plain, 0.0), rtol=1e-12, atol=1e-15)
    _, _, with_hole = value_and_gradient(loss_config_of("grpo_guard"), given, broken, batch)
    assert {name: with_hole[name] for name in metrics} == metrics


# --- What is refused


@pytest.mark.parametrize("mode", ["grpo_guard", "flow_dppo"])
def test_without_means_the_loss_says_what_is_missing(mode: str) -> None:
    given = three_steps()
    log_probs, gaussian = given.now(movement())
    for without in (None, gaussian._replace(kl=None)):
        with pytest.raises(ValueError, match=rf"{mode}.*prev_sample_mean"):
            diffusion_loss(loss_config_of(mode), log_probs, given.batch, without)


RC = "algorithm.rollout_correction"
GUARD = "actor.diffusion_loss.loss_mode=grpo_guard"


@pytest.mark.parametrize(
    ("further", "word"),
    [
        (
            ("rollout.algo.sde_type=cps", "rollout.algo.log_prob_convention=peers"),
            "log_prob_convention",
        ),
        ((f"{RC}.bypass_mode=true", f"{RC}.loss_type=reinforce"), "loss_type=reinforce"),
    ],
)
def test_settings_that_do_not_go_with_grpo_guard(
    train: Train, capsys: pytest.CaptureFixture, further: tuple[str, ...], word: str
) -> None:
    assert train(GUARD, *further) != 0
    assert word in capsys.readouterr().err


# --- On a model


@pytest.mark.parametrize("level", ["step", "window"])
def test_in_bypass_mode_the_anchor_is_the_rollout(model: FlowModel, level: str) -> None:
    """On a model with a bf16 rollout, the gradient is that of autograd with the recorded means."""
    policy = FlowPolicy(model, trained_lora(model))
    batch, _ = sample_images(
        model, policy.network, make_spec("sde", 1.0, dtype="bf16"), WINDOWS["all"], keep_means=True
    )
    advantages = torch.tensor([1.0, -1.0, 2.0, -0.5]).unsqueeze(1).expand(4, 4)
    batch = batch.replace(old_log_probs=batch.rollout_log_probs, advantages=advantages)
    settings = loss_config_of(
        "grpo_guard", RolloutCorrectionConfig(bypass_mode=True, bypass_level=level), clip=0.1
    )
    mode = mode_of(settings.rollout_correction, policy, terms=DiffusionObjective(settings).terms)
    total = torch.zeros(())
    for t in range(4):
        step = policy.transition(batch.step(t))
        old = batch.prev_sample_mean[:, t]
        std = step.std
        dt = batch.sigmas[t + 1] - batch.sigmas[t]
        log_ratio = (
            ((step.mean - old) * (batch.all_latents[:, t + 1] - old) / std).flatten(1).mean(1)
        )
        total = total + (-advantages[:, t] * log_ratio.exp()).sum() / -dt
    parameters = list(lora_parameters(policy.network).values())
    expect = torch.autograd.grad(total, parameters, allow_unused=True)
    bag = MetricBag()
    mode.loss(batch, lambda forward: forward.total.backward(), bag, updates=0)
    size = max(gradient.abs().max().item() for gradient in expect if gradient is not None)
    for parameter, gradient in zip(parameters, expect, strict=True):
        if gradient is not None:
            torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=1e-4 * size)
    assert bag.compute()["step_kl_max"] > 0
