"""`step_kl` rejects by the exact KL between the rollout's step and the training graph's."""

import math

import pytest
import torch
from support.builders import diffusion_batch, log_probs, loss_config
from support.image_rollouts import WINDOWS, make_spec, sample_images, trained_lora

from flowgrpo_rc import (
    compute_rollout_correction_and_rejection_mask,
    compute_rollout_rejection_mask,
    diffusion_loss,
)
from flowgrpo_rc.core.transition import GaussianSteps
from flowgrpo_rc.correction.config import RolloutCorrectionConfig
from flowgrpo_rc.correction.correct import Corrector
from flowgrpo_rc.models.base import FlowModel
from flowgrpo_rc.policies.flow import FlowPolicy

TRAINING, ROLLOUT = log_probs()
MASK = torch.ones_like(TRAINING, dtype=torch.bool)
KL = torch.linspace(0, 1, TRAINING.numel(), dtype=torch.float64).reshape(TRAINING.shape) ** 2
CONFIG = {"rollout_rs": "step_kl", "rollout_rs_threshold": 0.25}


# --- The divergence


@pytest.mark.parametrize(("kind", "convention"), [("sde", "gaussian"), ("cps", "peers")])
def test_it_is_the_kl_of_the_recorded_means_under_any_convention(
    model: FlowModel, kind: str, convention: str
) -> None:
    transformer = trained_lora(model)
    spec = make_spec(kind, 1.0, dtype="bf16", log_prob_convention=convention)
    batch, _ = sample_images(model, transformer, spec, WINDOWS["all"], keep_means=True)
    actual = FlowPolicy(model, transformer).measure(batch, 4, keep_means=True)
    square = ((actual.means - batch.prev_sample_mean) ** 2).flatten(2).mean(2)
    torch.testing.assert_close(actual.step_kl, square / (2 * actual.gaussian.std**2))
    assert actual.step_kl.min() > 0


def test_the_rollout_keeps_the_means_that_the_training_graph_finds_if_asked_to(
    model: FlowModel,
) -> None:
    transformer = trained_lora(model)
    given = (model, transformer, make_spec("sde", 4.5), WINDOWS["per_sample"])
    batch, _ = sample_images(*given, keep_means=True)
    policy = FlowPolicy(model, transformer)
    actual = policy.measure(batch, 4, keep_means=True)
    assert torch.equal(actual.means, batch.prev_sample_mean)
    assert torch.equal(actual.step_kl, torch.zeros(4, 2))
    torch.testing.assert_close(actual.gaussian.dt, batch.sigmas.diff()[batch.step_indices])
    batch, _ = sample_images(*given)
    actual = policy.measure(batch, 4)
    assert batch.prev_sample_mean is actual.step_kl is actual.means is None


# --- The criterion


def test_a_step_is_kept_up_to_the_bound() -> None:
    weights, kept, metrics = compute_rollout_correction_and_rejection_mask(
        TRAINING, ROLLOUT, MASK, rollout_is="token", step_kl=KL, **CONFIG
    )
    assert torch.equal(kept, KL <= 0.25)
    assert weights is not None
    name = "rollout_corr/rollout_rs_step_kl"
    assert metrics[f"{name}_mean"] == pytest.approx(KL.mean().item(), rel=1e-14)
    assert metrics[f"{name}_max"] == 1
    assert metrics[f"{name}_min"] == 0
    assert metrics[f"{name}_std"] == pytest.approx(
        KL.clamp(max=0.25).std(correction=0).item(), rel=1e-12
    )
    assert (
        metrics[f"{name}_fraction_high"]
        == metrics[f"{name}_masked_fraction"]
        == (KL > 0.25).double().mean().item()
    )
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == metrics[f"{name}_masked_fraction"]
    assert metrics[f"{name}_seq_masked_fraction"] == (KL > 0.25).any(1).double().mean().item()
    assert metrics[f"{name}_seq_max"] == pytest.approx(KL.mean(1).max().item(), rel=1e-14)
    direct = compute_rollout_rejection_mask(TRAINING - ROLLOUT, MASK, step_kl=KL, **CONFIG)
    assert torch.equal(direct, kept)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_kl_that_is_not_finite_rejects_its_step(value: float) -> None:
    kl = KL.clone()
    kl[1, 2] = value
    corrector = Corrector(RolloutCorrectionConfig(rollout_is="sequence", **CONFIG))
    actual = corrector(TRAINING, ROLLOUT, MASK, step_kl=kl)
    assert not actual.mask[1, 2]
    assert all(math.isfinite(x) for x in actual.metrics.compute().values())
    assert actual.metrics.compute()["rollout_rs_nonfinite_fraction"] == 1 / 24


def test_the_loss_in_bypass_mode_drops_what_step_kl_rejects() -> None:
    config = loss_config(RolloutCorrectionConfig(bypass_mode=True, **CONFIG))
    batch = diffusion_batch(ROLLOUT, old_log_probs=ROLLOUT, advantages=torch.ones_like(ROLLOUT))
    now = TRAINING.clone().requires_grad_()
    gaussian = GaussianSteps(torch.ones_like(KL), -torch.ones_like(KL), KL.clone().requires_grad_())
    loss, metrics = diffusion_loss(config, now, batch, gaussian)
    loss.backward()
    clipped = (TRAINING - ROLLOUT).exp() > 1.1
    assert torch.equal(now.grad != 0, (KL <= 0.25) & ~clipped)
    assert gaussian.kl.grad is None
    assert metrics.compute()["rollout_corr/rollout_rs_step_kl_max"] == 1


# --- What is refused


def test_the_criterion_and_its_tensor_need_each_other() -> None:
    corrector = Corrector(RolloutCorrectionConfig(**CONFIG))
    with pytest.raises(ValueError, match="prev_sample_mean"):
        corrector(TRAINING, ROLLOUT, MASK)
    with pytest.raises(ValueError, match="no effect"):
        compute_rollout_correction_and_rejection_mask(TRAINING, ROLLOUT, MASK, step_kl=KL)
    with pytest.raises(ValueError, match=r"step_kl.*\(6, 3\)"):
        compute_rollout_correction_and_rejection_mask(
            TRAINING, ROLLOUT, MASK, step_kl=KL[:, :3], **CONFIG
        )
    batch = diffusion_batch(ROLLOUT, old_log_probs=ROLLOUT, advantages=torch.ones_like(ROLLOUT))
    with pytest.raises(ValueError, match="prev_sample_mean"):
        diffusion_loss(
            loss_config(RolloutCorrectionConfig(bypass_mode=True, **CONFIG)), TRAINING, batch
        )
