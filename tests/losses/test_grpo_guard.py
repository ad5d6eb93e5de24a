"""GRPO-Guard: a ratio without bias, one for each sample and step, in both modes."""

import pytest
import torch
from support.compositions import config_of
from support.gaussian_losses import (
    BYPASS,
    DECOUPLED,
    Steps,
    loss_config_of,
    movement,
    three_steps,
    value_and_gradient,
)
from support.image_rollouts import KINDS
from support.oracles import Clip, clipped
from torch import Tensor

from flowgrpo_rc import RolloutCorrectionConfig, diffusion_loss
from flowgrpo_rc.spec.check_settings import check_settings


def guard_ratio(case: Steps, theta: Tensor, b: int, t: int) -> Tensor:
    """Computes the same ratio by the paper's closed form.

    It is exp(mean_D[(mean - old_mean) (x' - old_mean)] / std).
    """
    old = case.old_mean[b, t]
    shift = case.mean(theta)[b, t] - old
    return torch.exp((shift * (case.following[b, t] - old)).mean() / case.std[b, t])


# --- The formula


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("correction", [DECOUPLED, BYPASS], ids=["decoupled", "bypass"])
def test_loss_and_gradient_are_those_of_the_closed_form(
    kind: str, correction: RolloutCorrectionConfig
) -> None:
    case = three_steps(kind)
    theta = movement()
    value, gradient, metrics = value_and_gradient(
        loss_config_of("grpo_guard", correction), case, theta
    )
    leaf = theta.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    held = 0
    for b in range(6):
        for t in range(3):
            ratio = guard_ratio(case, leaf, b, t)
            a = case.batch.advantages[b, t].item()
            held += abs(ratio.item() - 1) > 0.01
            total = total + clipped(ratio, a, Clip(0.01, 0.01)) / -case.dt[b, t] / 18
    (expect,) = torch.autograd.grad(total, leaf)
    assert value == pytest.approx(total.item(), rel=1e-12)
    torch.testing.assert_close(gradient, expect, rtol=1e-9, atol=1e-13)
    assert 0 < torch.count_nonzero(gradient) < 18
    assert metrics["clip_fraction"] == held / 18


# --- What is refused


@pytest.mark.parametrize("mode", ["grpo_guard", "flow_dppo"])
def test_without_means_the_loss_says_what_is_missing(mode: str) -> None:
    case = three_steps()
    log_probs, gaussian = case.now(movement())
    for without in (None, gaussian._replace(kl=None)):
        with pytest.raises(ValueError, match=rf"{mode}.*prev_sample_mean"):
            diffusion_loss(loss_config_of(mode), log_probs, case.batch, without)


@pytest.mark.parametrize(
    ("further", "word"),
    [
        (["sde_type=cps", "log_prob_convention=peers"], "log_prob_convention"),
        (["bypass_mode=true", "loss_type=reinforce"], "loss_type=reinforce"),
    ],
)
def test_settings_that_do_not_go_with_grpo_guard(further: list[str], word: str) -> None:
    section = "rollout.algo" if "sde" in further[0] else "algorithm.rollout_correction"
    case = ("actor.diffusion_loss.loss_mode=grpo_guard", *(f"{section}.{x}" for x in further))
    with pytest.raises(ValueError, match=word):
        check_settings(config_of(*case))
