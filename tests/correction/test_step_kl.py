"""`step_kl` rejects by the exact KL between the rollout's step and the training graph's."""

from __future__ import annotations

import math

import pytest
import torch
from support.builders import diffusion_batch, log_probs, loss_config, on_shards, pieces
from support.image_rollouts import KINDS, WINDOWS, make_spec, sample_images, trained_lora
from torch import Tensor

from flowgrpo_rc import (
    compute_rollout_correction_and_rejection_mask,
    compute_rollout_rejection_mask,
    diffusion_loss,
)
from flowgrpo_rc.core.metrics import MetricBag
from flowgrpo_rc.core.transition import GaussianSteps
from flowgrpo_rc.correction.api import apply_rollout_correction_to_batch
from flowgrpo_rc.correction.config import RolloutCorrectionConfig
from flowgrpo_rc.correction.correct import Corrector
from flowgrpo_rc.correction.thresholds import parse_bands
from flowgrpo_rc.models.base import FlowModel
from flowgrpo_rc.policies.flow import FlowPolicy

TRAINING, ROLLOUT = log_probs()
MASK = torch.ones_like(TRAINING, dtype=torch.bool)
KL = torch.linspace(0, 1, TRAINING.numel(), dtype=torch.float64).reshape(TRAINING.shape) ** 2
CONFIG = {"rollout_rs": "step_kl", "rollout_rs_threshold": 0.25}


# --- The divergence


@pytest.mark.parametrize("convention", ["gaussian", "peers"])
def test_the_convention_of_log_probs_does_not_change_step_kl(
    model: FlowModel, convention: str
) -> None:
    transformer = trained_lora(model)
    spec = make_spec("cps", 1.0, dtype="bf16", log_prob_convention=convention)
    batch, _ = sample_images(model, transformer, spec, WINDOWS["all"], keep_means=True)
    found = FlowPolicy(model, transformer).measure(batch, 4, keep_means=True)
    std = batch.sigmas[batch.step_indices + 1] * math.sin(0.35 * math.pi)
    square = ((found.means - batch.prev_sample_mean) ** 2).flatten(2).mean(2)
    torch.testing.assert_close(found.step_kl, square / (2 * std**2))
    assert found.step_kl.min() > 0


@pytest.mark.parametrize("window", ["first", "per_sample"])
def test_the_rollout_keeps_the_means_that_the_training_graph_finds(
    model: FlowModel, window: str
) -> None:
    transformer = trained_lora(model)
    batch, _ = sample_images(
        model, transformer, make_spec("sde", 4.5), WINDOWS[window], keep_means=True
    )
    found = FlowPolicy(model, transformer).measure(batch, 4, keep_means=True)
    assert torch.equal(found.means, batch.prev_sample_mean)
    assert torch.equal(found.step_kl, torch.zeros(4, 2))
    assert found.gaussian.std.shape == found.gaussian.dt.shape == (4, 2)
    torch.testing.assert_close(found.gaussian.dt, batch.sigmas.diff()[batch.step_indices])


def test_means_are_kept_only_if_asked_for(model: FlowModel) -> None:
    transformer = trained_lora(model)
    batch, _ = sample_images(model, transformer, make_spec("sde", 1.0), WINDOWS["first"])
    found = FlowPolicy(model, transformer).measure(batch, 4)
    assert batch.prev_sample_mean is None
    assert found.step_kl is None
    assert found.means is None


class Faulty(FlowPolicy):
    """A policy whose velocity is off by a fixed direction, with another amplitude for each
    sample.
    """

    amplitudes: Tensor

    def _velocity(self, latents: Tensor, *arguments: object) -> Tensor:
        direction = torch.randn(latents.shape[1:], generator=torch.Generator().manual_seed(5))
        v = super()._velocity(latents, *arguments)  # type: ignore[arg-type]
        return v + self.amplitudes.reshape(-1, 1, 1, 1) * direction


@pytest.mark.parametrize("kind", KINDS)
def test_step_kl_ranks_planted_errors_without_an_inversion(model: FlowModel, kind: str) -> None:
    """32 samples have errors of growing size.

    At every step the exact KL has the same order. The difference of log-probs has not: it contains
    the noise of the sample.
    """
    transformer = trained_lora(model)
    policy = FlowPolicy(model, transformer)
    faulty = Faulty(model, transformer)
    faulty.amplitudes = torch.linspace(1e-4, 1e-3, 32)
    shape = model.latent_shape(make_spec(kind, 1.0))
    source = torch.Generator().manual_seed(7)
    conditioning = model.encode(["A"], max_sequence_length=16)[torch.zeros(32, dtype=torch.int64)]
    trajectory = faulty.rollout(
        torch.randn((32, *shape), generator=source),
        conditioning,
        None,
        make_spec(kind, 1.0),
        torch.arange(4).expand(32, -1),
        lambda step: torch.randn((32, *shape), generator=torch.Generator().manual_seed(step)),
        keep_means=True,
    )
    batch = diffusion_batch(
        trajectory.log_probs,
        prev_sample_mean=trajectory.means,
    ).replace(
        spec=make_spec(kind, 1.0),
        all_latents=trajectory.window_latents,
        all_timesteps=trajectory.schedule.timesteps[:4].expand(32, -1),
        sigmas=trajectory.schedule.sigmas,
        conditioning=conditioning[torch.zeros(1, dtype=torch.int64)],
    )
    found = policy.measure(batch, 32)
    assert (found.step_kl.diff(dim=0) > 0).all()
    assert ((found.log_probs - trajectory.log_probs).abs().diff(dim=0) < 0).any(0).all()
    growth = (found.step_kl[-1] / found.step_kl[0]).tolist()
    assert growth == pytest.approx([100.0] * 4, rel=0.05)  # the square of ten


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


def test_step_kl_combines_with_other_criteria() -> None:
    config = {"rollout_rs": "token_k1,step_kl", "rollout_rs_threshold": "0.7_1.5,0.25"}
    kept = compute_rollout_rejection_mask(TRAINING - ROLLOUT, MASK, step_kl=KL, **config)
    ratio = (TRAINING - ROLLOUT).exp()
    assert torch.equal(kept, (KL <= 0.25) & (ratio >= 0.7) & (ratio <= 1.5))
    assert 0 < kept.sum() < (KL <= 0.25).sum()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_kl_that_is_not_finite_rejects_its_step(value: float) -> None:
    kl = KL.clone()
    kl[1, 2] = value
    corrector = Corrector(RolloutCorrectionConfig(rollout_is="sequence", **CONFIG))
    found = corrector(TRAINING, ROLLOUT, MASK, step_kl=kl)
    assert not found.mask[1, 2]
    assert all(math.isfinite(x) for x in found.metrics.compute().values())
    assert found.metrics.compute()["rollout_rs_nonfinite_fraction"] == 1 / 24


def test_rows_on_other_processes_change_nothing() -> None:
    config = RolloutCorrectionConfig(
        rollout_is="token", rollout_is_batch_normalize=True, normalize="kept", **CONFIG
    )
    batch = diffusion_batch(ROLLOUT, old_log_probs=TRAINING)
    whole, bag = apply_rollout_correction_to_batch(batch, config, step_kl=KL)
    shares = pieces(batch, [1, 4])
    cuts = [slice(0, 1), slice(1, 4), slice(4, 6)]

    def work(rank, reduce):
        found = apply_rollout_correction_to_batch(
            shares[rank], config, step_kl=KL[cuts[rank]], all_reduce=reduce["sum"]
        )
        return found, found[1].compute(reduce["sum"], reduce["max"])

    for rank, ((part, _), values) in enumerate(on_shards(3, work)):
        assert torch.equal(part.rejection_mask, whole.rejection_mask[cuts[rank]])
        torch.testing.assert_close(
            part.rollout_is_weights, whole.rollout_is_weights[cuts[rank]], rtol=1e-12, atol=1e-12
        )
        assert values == pytest.approx(bag.compute(), rel=1e-12, abs=1e-12)


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


@pytest.mark.parametrize("spec", ["0.5_2.0", 0, -1, "nan", "inf"])
def test_step_kl_takes_one_upper_bound(spec: object) -> None:
    assert parse_bands("step_kl", 0.01)[0][2:4] == (-math.inf, 0.01)
    with pytest.raises(ValueError, match=r"step_kl|number"):
        parse_bands("step_kl", spec)


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


# --- In a run


def test_metrics_of_micro_batches_are_those_of_the_batch() -> None:
    corrector = Corrector(RolloutCorrectionConfig(**CONFIG))
    whole = corrector(TRAINING, ROLLOUT, MASK, step_kl=KL)
    bag = MetricBag()
    for rows in (slice(0, 2), slice(2, 6)):
        bag.merge(corrector(TRAINING[rows], ROLLOUT[rows], MASK[rows], step_kl=KL[rows]).metrics)
    assert bag.compute() == pytest.approx(whole.metrics.compute(), rel=1e-12, abs=1e-15)
