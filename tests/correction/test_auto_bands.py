"""`auto:k`: bands around the running median of the mismatch, for each step and stage."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from benchmark_correction import cost
from support.builders import diffusion_batch, loss_config, on_shards
from support.costs import Counting
from support.image_rollouts import WINDOWS, make_spec, sample_images, trained_lora
from support.modes import iterate, mode_of, update_of
from support.oracles import estimate
from torch import Tensor

from flowgrpo_rc import compute_rollout_correction_and_rejection_mask
from flowgrpo_rc.algorithms.policy_gradient.algorithm import PolicyGradient
from flowgrpo_rc.algorithms.policy_gradient.images import DiffusionObjective
from flowgrpo_rc.batch import DiffusionBatch
from flowgrpo_rc.core.reduce import AllReduce, identity
from flowgrpo_rc.correction import history
from flowgrpo_rc.correction.api import apply_rollout_correction_to_batch
from flowgrpo_rc.correction.auto_bands import (
    LEAST_SPREAD,
    WARM_UP,
    AutoBands,
    Gather,
    stage_of,
)
from flowgrpo_rc.correction.config import RolloutCorrectionConfig
from flowgrpo_rc.correction.thresholds import parse_bands
from flowgrpo_rc.models.base import FlowModel
from flowgrpo_rc.training.update import PolicyUpdate

CPU = torch.device("cpu")
NAMES = ("token_k1", "token_k2", "token_k3", "seq_mean_k1", "seq_sum_k2", "seq_max_k3", "step_kl")
STEPS = torch.tensor([1e-5, 3e-5, 1e-4, 5e-4]).double()  # the mismatch grows along the trajectory


def auto_bands(
    names: str = ",".join(NAMES), spec: str = "auto:4", num_steps: int = 6, mini_batches: int = 1
) -> AutoBands:
    return AutoBands(parse_bands(names, spec), num_steps, CPU, num_mini_batches=mini_batches)


def mismatch(
    seed: int, rows: int = 64, planted: float = 0.0
) -> tuple[DiffusionBatch, Tensor, Tensor]:
    """Makes a batch, log-probs of the training graph, and the KL.

    Differences are normal about a shift of a third of their deviation. `planted` moves all steps of
    a sample by so many deviations, up or down.
    """
    source = torch.Generator().manual_seed(seed)
    noise, spread = torch.randn(2, rows, 4, generator=source, dtype=torch.float64)
    sign = torch.randint(2, (rows, 1), generator=source) * 2 - 1
    root = 1e-3 * (1 + 0.2 * spread + 0.2 * planted)
    return (
        diffusion_batch(torch.zeros(rows, 4).double()),
        STEPS * (noise + 1 / 3 + planted * sign),
        root**2 / 2,
    )


def warmed(bands: AutoBands, iterations: int = 8) -> AutoBands:
    for seed in range(iterations):
        bands.judge(*mismatch(seed))
        bands.finish(identity)
    return bands


def same_scales(one: AutoBands, two: AutoBands) -> bool:
    return all(
        torch.equal(*pair)
        for name in NAMES
        for pair in zip(one.scale(name), two.scale(name), strict=True)
    )


# --- Closed forms


@pytest.mark.parametrize("name", NAMES)
def test_exactly_the_rejected_samples_have_reasons_with_the_bounds_of_their_step(name: str) -> None:
    bands = warmed(auto_bands(name))
    batch, training, kl = mismatch(99, 40, planted=3.0)
    batch = batch.replace(seed=torch.arange(40) + 7)
    # In two parts, as micro-batches are.
    parts = [
        bands.judge(batch.rows(start, stop), training[start:stop], kl[start:stop])[0]
        for start, stop in ((0, 25), (25, 40))
    ]
    rejected = ~torch.cat([part.rejection_mask for part in parts]).all(1)
    scale = bands.scale(name)
    bands.finish(identity)  # the reasons are those of the iteration that is over
    actual = [bands.reasons(seed) for seed in batch.seed.tolist()]
    assert [bool(reasons) for reasons in actual] == rejected.tolist()
    assert 0 < rejected.sum() < 40
    bounds = set()
    for centre, spread in zip(*(numbers.tolist() for numbers in scale), strict=True):
        low, high = centre - 4 * spread, centre + 4 * spread
        known = (math.exp(-high), math.exp(-low)) if name.endswith("k1") else (None, high**2 / 2)
        bounds.add(known)
    for (reason,) in filter(None, actual):
        assert reason.criterion == name
        assert (reason.lower, reason.upper) in bounds
        assert not (reason.lower or 0) <= reason.value <= reason.upper
    bands.judge(batch, training * 0, kl * 0)
    assert bands.reasons(7) == []


@pytest.mark.parametrize("name", NAMES)
def test_a_step_is_kept_within_k_deviations(name: str) -> None:
    """Numpy judges one step of the schedule, or the first of the window, at a time."""
    bands = warmed(auto_bands(name))
    batch, training, kl = mismatch(99, 200, planted=3.0)
    level, estimator = name.rsplit("_", 1)

    def natural(training: Tensor, kl: Tensor) -> np.ndarray:
        if name == "step_kl":
            return kl.mul(2).sqrt().numpy()
        rows = np.array([[estimate(estimator, x) for x in row] for row in training.tolist()])
        if level != "token":
            rows = {"seq_mean": rows.mean, "seq_sum": rows.sum, "seq_max": rows.max}[level](
                1, keepdims=True
            )
        return rows if estimator == "k1" else np.sqrt(2 * rows)

    past = np.concatenate([natural(*mismatch(seed)[1:]) for seed in range(8)])
    median = np.median(past, 0)
    above = np.quantile(past, 0.75, 0) - median
    spread = 1.4826 * (np.median(abs(past - median), 0) if estimator == "k1" else above)
    z = (natural(training, kl) - median) / spread
    inside = (abs(z) if estimator == "k1" else z) <= 4
    judged, metrics = bands.judge(batch, training, kl)
    assert np.array_equal(judged.rejection_mask.numpy(), np.broadcast_to(inside, (200, 4)))
    assert 0.02 < inside.mean() < 0.98
    actual = metrics.compute()
    assert actual[f"rollout_rs_{name}_mean"] == pytest.approx(z.mean(), rel=1e-9)
    assert actual[f"rollout_rs_{name}_auto_spread"] == pytest.approx(spread.mean(), rel=1e-12)
    assert actual[f"rollout_rs_{name}_auto_warm_fraction"] == 1


# --- What it promises


def test_nothing_is_rejected_before_a_band_has_seen_enough() -> None:
    bands = auto_bands("token_k1,step_kl")
    batch, training, kl = mismatch(0, WARM_UP - 1)
    bands.judge(batch, training, kl)
    bands.finish(identity)
    far = mismatch(1, 8, planted=1e6)
    judged, metrics = bands.judge(*far)
    assert judged.rejection_mask.all()
    assert metrics.compute()["rollout_rs_token_k1_auto_warm_fraction"] == 0
    bands.finish(identity)
    judged, _ = bands.judge(*far)
    assert not judged.rejection_mask.any()


def test_what_is_not_finite_is_rejected_and_not_observed() -> None:
    bands = auto_bands("token_k1,seq_mean_k1")
    (batch, training, kl) = mismatch(0)
    training[0, 1] = math.nan
    judged, metrics = bands.judge(batch, training, kl)
    # The sequence has a step that cannot be judged.
    assert judged.rejection_mask[0].tolist() == [False] * 4
    assert judged.rejection_mask[1:].all()
    assert all(math.isfinite(value) for value in metrics.compute().values())
    bands.finish(identity)
    seen = bands.scale("token_k1").spread.isfinite().tolist()
    assert seen == [True, False, True, True, False, False]


def test_rounding_of_equal_precisions_is_not_rejected() -> None:
    """Differences of exactly 0 have no deviation.

    The least width leaves room for sums in another order.
    """
    bands = auto_bands("token_k1", "auto:4")
    (batch, training, _) = mismatch(0)
    bands.judge(batch, 0 * training, None)
    bands.finish(identity)
    ones = torch.ones_like(training)
    assert bands.judge(batch, 3.9 * LEAST_SPREAD * ones, None)[0].rejection_mask.all()
    assert not bands.judge(batch, 4.1 * LEAST_SPREAD * ones, None)[0].rejection_mask.any()


def test_a_band_follows_the_newest_iterations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MEMORY", (3, 3 * 4 * 64))
    bands = auto_bands("token_k1")
    for seed in range(4):
        batch, training, kl = mismatch(seed)
        bands.judge(batch, (1 if seed < 1 else 100) * training, kl)
        bands.finish(identity)
    only_new = auto_bands("token_k1")
    for seed in range(1, 4):
        batch, training, kl = mismatch(seed)
        only_new.judge(batch, 100 * training, kl)
        only_new.finish(identity)
    assert torch.equal(bands.scale("token_k1").spread, only_new.scale("token_k1").spread)
    assert len(bands._histories["token_k1"]._past) == 3


def test_processes_share_their_bands() -> None:
    """Three processes with a third of the samples each have the bands of one process with all."""
    iterations = [mismatch(seed, 66) for seed in range(4)]

    def part(given: tuple[DiffusionBatch, Tensor, Tensor], rows: slice) -> Any:
        batch, training, kl = given
        return batch.rows(rows.start, rows.stop), training[rows], kl[rows]

    def work(
        rows: slice, gather: Gather, *reduce: AllReduce
    ) -> tuple[Tensor, dict[str, float], AutoBands]:
        bands = auto_bands()
        for given in iterations:
            bands.judge(*part(given, rows))
            bands.finish(gather)
        actual, metrics = bands.judge(*part(mismatch(99, 66, planted=3.0), rows))
        return actual.rejection_mask, metrics.compute(*reduce), bands

    def on_rank(rank: int, reduce: Mapping[str, AllReduce]) -> Any:
        rows = slice(22 * rank, 22 * rank + 22)
        return work(rows, reduce["gather"], reduce["sum"], reduce["max"])

    expect, values, alone = work(slice(0, 66), identity)
    actual = on_shards(3, on_rank)
    assert torch.equal(torch.cat([mask for mask, _, _ in actual]), expect)
    assert 0 < expect.sum() < expect.numel()
    for _, metrics, bands in actual:
        assert metrics == pytest.approx(values, rel=1e-12, abs=1e-12)
        assert same_scales(bands, alone)


def test_a_checkpoint_holds_the_past_mismatch() -> None:
    bands = warmed(auto_bands(), 3)
    fresh = auto_bands()
    fresh.load(bands.tensors())
    one, two = (warmed(each, 8).tensors() for each in (bands, fresh))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert same_scales(bands, fresh)
    auto_bands().load(auto_bands().tensors())  # before the first iteration


def test_a_decision_costs_no_host_transfer() -> None:
    bands = warmed(auto_bands())
    given = mismatch(99)
    assert cost(lambda: bands.judge(*given)).transfers == 0


# --- In the update


def bypass_update(
    model: FlowModel, epochs: int, history: float, later: float, lr: float = 1e-1
) -> tuple[PolicyUpdate, PolicyGradient, Counting, DiffusionBatch]:
    """Makes an update of two mini-batches that moves the policy far.

    Its bands know differences of scale `history` in the first one, and `later` in the second.
    """
    transformer = trained_lora(model)
    batch, _ = sample_images(model, transformer, make_spec("sde", 1.0), WINDOWS["first"])
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0]).unsqueeze(1).expand(4, 2)
    bands = auto_bands("token_k1", num_steps=5, mini_batches=2)
    past, values, _ = mismatch(0, 1000)
    bands.judge(past, history * values / STEPS, None)
    bands.judge(past, later * values / STEPS, None, updates=1)
    bands.finish(identity)
    correction = RolloutCorrectionConfig(
        bypass_mode=True, rollout_rs="token_k1", rollout_rs_threshold="auto:4"
    )
    policy = Counting(model, transformer)
    terms = DiffusionObjective(loss_config(correction)).terms
    mode = mode_of(correction, policy, micro_batch_size=2, auto_bands=bands, terms=terms)
    batch = batch.replace(old_log_probs=batch.rollout_log_probs, advantages=advantages)
    return update_of(mode, lr=lr, ppo_epochs=epochs), mode, policy, batch


def test_what_updates_usually_move_is_not_rejected(model: FlowModel) -> None:
    """The first update moves later ratios far outside a band of 4e-6, but not outside that of the
    second mini-batch. The second epoch keeps the decision of the first.
    """
    update, mode, policy, batch = bypass_update(model, 2, history=1e-6, later=1.0)
    actual = iterate(update, mode, batch, 2)
    assert actual["rollout_corr/rollout_rs_token_k1_masked_fraction"] == 0
    assert actual["rollout_corr/rollout_rs_masked_fraction"] == 0
    assert actual["rollout_corr/rollout_rs_token_k1_auto_warm_fraction"] == 1
    assert actual["rollout_corr/logprob_abs_diff_max"] > 1e-4
    assert policy.forwards == 8


@pytest.mark.parametrize(("sample_index", "epochs"), [(0, 2), (3, 1)])
def test_a_planted_error_is_rejected_in_any_mini_batch(
    model: FlowModel, sample_index: int, epochs: int
) -> None:
    update, mode, _, batch = bypass_update(model, epochs, history=1e-5, later=1e-5, lr=1e-6)
    faulty = batch.rollout_log_probs.clone()
    faulty[sample_index, 1] += 1e-4
    batch = batch.replace(rollout_log_probs=faulty, old_log_probs=faulty)
    actual = iterate(update, mode, batch, 2)
    assert actual["rollout_corr/rollout_rs_token_k1_masked_fraction"] == 1 / 8
    assert actual["rollout_corr/rollout_rs_masked_fraction"] == 1 / 8
    assert len(mode.auto_bands._histories["token_k1"]._past) == 2


def test_stages_double_in_length() -> None:
    assert [stage_of(updates) for updates in (0, 1, 2, 3, 4, 7, 8)] == [0, 1, 2, 2, 3, 3, 4]
    bands = auto_bands("token_k1", num_steps=2, mini_batches=5)
    assert bands.scale("token_k1").spread.shape == (2 * 4,)


def test_an_earlier_decision_is_narrowed_and_counted() -> None:
    """In decoupled mode the mask of the bands, other criteria and the mean of the weights
    combine.
    """
    batch, training, _ = mismatch(0, 6)
    before = torch.ones(6, 4, dtype=torch.bool)
    before[0] = False
    before[1, 2] = False
    config = RolloutCorrectionConfig(
        rollout_is="token",
        rollout_is_batch_normalize=True,
        normalize="kept",
        rollout_rs="token_k1,token_k2",
        rollout_rs_threshold=["auto:4", 1e-8],
    )
    batch = batch.replace(old_log_probs=training, rejection_mask=before)
    actual, metrics = apply_rollout_correction_to_batch(batch, config)
    kept = before & (training**2 / 2 <= 1e-8)
    assert torch.equal(actual.rejection_mask, kept)
    assert 0 < kept.sum() < before.sum()
    torch.testing.assert_close(
        actual.rollout_is_weights, training.exp() / training.exp()[kept].mean()
    )
    assert metrics.compute()["rollout_rs_masked_fraction"] == pytest.approx(
        1 - kept.double().mean().item()
    )


def test_an_auto_band_outside_a_run_is_refused() -> None:
    settings = {"rollout_rs": "token_k1", "rollout_rs_threshold": "auto:4"}
    _, training, _ = mismatch(0)
    with pytest.raises(ValueError, match="AutoBands"):
        compute_rollout_correction_and_rejection_mask(
            training, training, torch.ones_like(training), **settings
        )
    batch = diffusion_batch(training, old_log_probs=training)
    with pytest.raises(ValueError, match="AutoBands"):
        apply_rollout_correction_to_batch(batch, RolloutCorrectionConfig(**settings))
