"""diffusion_loss: value, gradient and metrics against independent formulas."""

from __future__ import annotations

import math

import pytest
import torch
from support import oracles
from support.builders import (
    assert_same,
    diffusion_batch,
    expected,
    gradient_of,
    loss_config,
    on_shards,
    pieces,
    reference_loss,
    settings,
)
from support.oracles import CRITERIA, LEVELS, Clip, Rule, ppo
from torch import Tensor

from flowgrpo_rc import (
    DiffusionLossConfig,
    LossConfig,
    RolloutCorrectionConfig,
    apply_bypass_mode_to_diffusion_batch,
    apply_rollout_correction_to_diffusion_batch,
    diffusion_loss,
)
from flowgrpo_rc.algorithms.policy_gradient.images import DiffusionObjective
from flowgrpo_rc.batch import DiffusionBatch
from flowgrpo_rc.core.metrics import MetricBag
from flowgrpo_rc.losses.base import denominator

ADV_CLIP = 1.5
CLIP = Clip(0.1, 0.1)
REINFORCE = {"bypass_mode": True, "loss_type": "reinforce"}


def drawn(
    scale: float = 0.3, shape: tuple[int, int] = (8, 3)
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draws rollout, old and current log-probs and advantages, float64.

    Some advantages lie beyond the clip.
    """
    source = torch.Generator().manual_seed(4)
    rollout, *moves, advantages = (
        torch.randn(shape, generator=source, dtype=torch.float64) for _ in range(4)
    )
    old = rollout + scale * moves[0]
    return rollout, old, old + scale * moves[1], 1.5 * advantages


def everything(values: Tensor) -> Tensor:
    return torch.ones_like(values, dtype=torch.bool)


def bypass(rollout: Tensor, advantages: Tensor) -> DiffusionBatch:
    return apply_bypass_mode_to_diffusion_batch(diffusion_batch(rollout, advantages=advantages))


def value_and_gradient(
    config: LossConfig, log_probs: Tensor, batch: DiffusionBatch
) -> tuple[float, Tensor, MetricBag]:
    found = gradient_of(lambda x: diffusion_loss(config, x, batch)[0], log_probs)
    return *found, diffusion_loss(config, log_probs, batch)[1]


def reference(
    config: LossConfig, rule: Rule, now: Tensor, *tensors: Tensor
) -> tuple[float, Tensor]:
    """Computes the loss of the documents from `tensors`: rollout, old, advantages.

    Rejected steps stay in the mean unless the setting says otherwise.
    """
    kept = config.rollout_correction.normalize == "kept"
    total = reference_loss(
        config,
        rule._replace(over_kept=kept),
        *tensors,
        everything(now),
        clip=CLIP,
        aggregation="token-mean",
        counts_kept=kept,
    )
    return gradient_of(total, now)


BOUNDS = {
    "token_k2": 0.05,
    "token_k3": 0.05,
    "seq_sum_k2": 0.18,
    "seq_sum_k3": 0.18,
    "seq_mean_k2": 0.06,
}
BOUNDS |= {"seq_mean_k3": 0.06, "seq_max_k2": 0.12, "seq_max_k3": 0.12}


def bands_of(criterion: str | None) -> tuple[tuple[str, float, float], ...]:
    if criterion is None:
        return ()
    return (
        ((criterion, 0.0, BOUNDS[criterion]),) if criterion in BOUNDS else ((criterion, 0.75, 1.4),)
    )


# --- PPO clip


@pytest.mark.parametrize("clip", [1e-4, 0.05, 0.5])
@pytest.mark.parametrize("level", [None, *LEVELS])
def test_bypass_is_plain_ppo_on_the_rollout_log_probs(clip, level):
    """Weights are diagnostics here, since the ratio current / rollout is the weight already."""
    rollout, _, now, advantages = drawn()
    config = loss_config(
        RolloutCorrectionConfig(bypass_mode=True, rollout_is=level), clip=clip, adv_clip=ADV_CLIP
    )
    held = advantages.clamp(-ADV_CLIP, ADV_CLIP)
    expect = gradient_of(lambda x: ppo(x, rollout, held, Clip(clip, clip)).mean(), now)
    assert_same(value_and_gradient(config, now, bypass(rollout, advantages))[:2], expect)


@pytest.mark.parametrize("criterion", CRITERIA)
@pytest.mark.parametrize("num_steps", [1, 3])
def test_bypass_with_rejection_leaves_out_what_the_criterion_rejects(criterion, num_steps):
    rollout, _, now, advantages = drawn(shape=(8, num_steps))
    rule = Rule("sequence", bands=bands_of(criterion))
    config = loss_config(RolloutCorrectionConfig(bypass_mode=True, **settings(rule)))
    kept = torch.tensor(expected(now, rollout, everything(now), rule).kept)
    assert 0 < kept.sum() < kept.numel()
    expect = gradient_of(
        lambda x: (ppo(x, rollout, advantages, CLIP)[kept]).sum() / kept.numel(), now
    )
    found = value_and_gradient(config, now, bypass(rollout, advantages))
    assert_same(found[:2], expect)
    assert torch.count_nonzero(found[1][~kept]) == 0
    values = found[2].compute()
    assert values["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(
        (~kept).double().mean().item()
    )


@pytest.mark.parametrize("level", [None, *LEVELS])
@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("criterion", [None, "token_k1", "seq_mean_k1", "seq_max_k2"])
@pytest.mark.parametrize("normalize", [None, "kept"])
def test_decoupled_multiplies_by_the_weights_of_the_kept_steps(
    level, normalised, criterion, normalize
):
    rollout, old, now, advantages = drawn()
    rule = Rule(
        level, upper=1.2, bands=bands_of(criterion), normalise=normalised and level is not None
    )
    config = loss_config(RolloutCorrectionConfig(**settings(rule) | {"normalize": normalize}))
    full = diffusion_batch(rollout, old_log_probs=old, advantages=advantages)
    batch, _ = apply_rollout_correction_to_diffusion_batch(full, config.rollout_correction)
    expect = reference(config, rule, now, rollout, old, advantages)
    assert_same(value_and_gradient(config, now, batch)[:2], expect)


@pytest.mark.parametrize("level", [None, *LEVELS])
def test_decoupled_with_rollout_equal_to_old_is_bypass_and_plain_ppo(level):
    rollout, _, now, advantages = drawn()
    rs = {"rollout_is": level, "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.5_2.0"}
    decoupled = RolloutCorrectionConfig(**rs)
    full = diffusion_batch(rollout, old_log_probs=rollout, advantages=advantages)
    batch, _ = apply_rollout_correction_to_diffusion_batch(full, decoupled)
    found = value_and_gradient(loss_config(decoupled), now, batch)
    plain = RolloutCorrectionConfig(bypass_mode=True)
    other = value_and_gradient(loss_config(plain), now, bypass(rollout, advantages))
    assert found[0] == other[0]
    assert torch.equal(found[1], other[1])


@pytest.mark.parametrize("advantage", [2.0, -2.0])
@pytest.mark.parametrize("move", [0.3, -0.3, 0.05, -0.05])
def test_the_clipped_side_has_no_gradient_and_the_other_has(advantage, move):
    """An update that would go on in its direction is clipped: above for A > 0, below for A < 0."""
    rollout = torch.zeros(1, 1, dtype=torch.float64)
    batch = bypass(rollout, torch.full((1, 1), advantage, dtype=torch.float64))
    config = loss_config(RolloutCorrectionConfig(bypass_mode=True), clip=0.1)
    value, gradient, _ = value_and_gradient(config, rollout + move, batch)
    beyond = abs(move) > 0.1 and (advantage > 0) == (move > 0)
    ratio = 1 + math.copysign(0.1, move) if beyond else math.exp(move)
    assert value == pytest.approx(-advantage * ratio, abs=1e-14)
    assert gradient.item() == pytest.approx(0 if beyond else -advantage * math.exp(move), abs=1e-14)
    assert beyond == (gradient.item() == 0)


def test_on_policy_the_gradient_is_that_of_the_policy_gradient():
    rollout, _, _, advantages = drawn()
    config = loss_config(RolloutCorrectionConfig(bypass_mode=True), clip=1e-5, adv_clip=100)
    value, gradient, metrics = value_and_gradient(config, rollout, bypass(rollout, advantages))
    torch.testing.assert_close(gradient, -advantages / 24, rtol=1e-14, atol=0)
    assert value == pytest.approx(-advantages.mean().item(), abs=1e-14)
    values = metrics.compute()
    assert values["ratio_mean"] == 1
    assert values["ratio_std"] == values["clip_fraction"] == 0


def test_clip_fractions_and_ratio_moments():
    move = torch.tensor(
        [[0.2, 0.05, -0.3], [0.0, -0.2, -0.05], [0.3, math.nan, -0.4]], dtype=torch.float64
    )
    rollout = torch.zeros_like(move)
    config = loss_config(RolloutCorrectionConfig(bypass_mode=True), clip=0.1)
    values = value_and_gradient(config, move, bypass(rollout, torch.ones_like(move)))[2].compute()
    ratios = [math.exp(x) for x in move.flatten().tolist() if not math.isnan(x)]
    assert values["clip_fraction_higher"] == 2 / 8
    assert values["clip_fraction_lower"] == 3 / 8
    assert values["clip_fraction"] == 5 / 8
    assert values["ratio_mean"] == pytest.approx(oracles.mean(ratios), abs=1e-14)
    assert values["ratio_std"] == pytest.approx(oracles.std(ratios), abs=1e-13)


def test_ratio_moments_keep_their_digits_at_the_scale_of_diffusion():
    rollout, _, now, advantages = drawn(scale=1e-7)
    config = loss_config(RolloutCorrectionConfig(bypass_mode=True), clip=1e-5)
    values = value_and_gradient(config, now, bypass(rollout, advantages))[2].compute()
    moves = [math.expm1(x) for x in (now - rollout).flatten().tolist()]
    assert values["ratio_std"] == pytest.approx(oracles.std(moves), rel=1e-8)


# --- REINFORCE


@pytest.mark.parametrize("level", [None, *LEVELS])
@pytest.mark.parametrize("criterion", [None, "token_k1", "seq_sum_k1", "seq_mean_k3"])
@pytest.mark.parametrize("normalised", [False, True])
def test_reinforce_is_minus_advantage_weight_log_prob_with_the_weight_detached(
    level, criterion, normalised
):
    rollout, old, now, advantages = drawn()
    rule = Rule(
        level, upper=1.2, bands=bands_of(criterion), normalise=normalised and level is not None
    )
    config = loss_config(RolloutCorrectionConfig(**settings(rule), **REINFORCE), adv_clip=ADV_CLIP)
    held = advantages.clamp(-ADV_CLIP, ADV_CLIP)
    found = value_and_gradient(config, now, bypass(rollout, advantages))
    assert_same(found[:2], reference(config, rule, now, rollout, old, held))
    correct = expected(now, rollout, everything(now), rule)
    weights = torch.tensor(correct.weights or torch.ones_like(now).tolist(), dtype=torch.float64)
    closed = torch.where(torch.tensor(correct.kept), -held * weights / 24, 0.0)
    torch.testing.assert_close(found[1], closed, rtol=1e-12, atol=0)


# --- Selection

LOSSES = [
    RolloutCorrectionConfig(bypass_mode=True),
    RolloutCorrectionConfig(
        bypass_mode=True, rollout_is="sequence", rollout_rs="token_k1", rollout_rs_threshold=3.0
    ),
    RolloutCorrectionConfig(bypass_mode=True, loss_type="reinforce"),
    RolloutCorrectionConfig(bypass_mode=True, loss_type="reinforce", rollout_is="token"),
    RolloutCorrectionConfig(bypass_mode=True, loss_type="reinforce", rollout_is="sequence"),
    RolloutCorrectionConfig(bypass_mode=True, normalize="kept", rollout_token_veto_threshold=1e-9),
]


@pytest.mark.parametrize("correction", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("current", "rolled"),
    [
        (math.nan, 0.0),
        (math.inf, 0.0),
        (-math.inf, 0.0),
        (0.0, math.inf),
        (0.0, -math.inf),
        (0.0, math.nan),
    ],
)
def test_a_row_that_is_not_finite_leaves_everything_else_as_it_was(
    correction, dtype, current, rolled
):
    rollout, _, now, advantages = (x.to(dtype) for x in drawn(shape=(6, 1)))
    rollout[2] = rolled
    now[2] = current
    others = torch.tensor([0, 1, 3, 4, 5])
    config = loss_config(correction)
    found = value_and_gradient(config, now, bypass(rollout, advantages))
    without = value_and_gradient(config, now[others], bypass(rollout[others], advantages[others]))
    share = 1 if correction.normalize == "kept" else 5 / 6
    accuracy = 1e-6 if dtype == torch.float32 else 1e-13
    assert found[0] == pytest.approx(without[0] * share, rel=accuracy)
    torch.testing.assert_close(found[1][others], without[1] * share, rtol=accuracy, atol=0)
    assert found[1][2].item() == 0
    assert all(math.isfinite(value) for value in found[2].compute().values())


@pytest.mark.parametrize("level", [None, *LEVELS])
def test_decoupled_selects_rows_out_too(level):
    rollout, old, now, advantages = drawn(shape=(6, 1))
    rollout[1] = -math.inf
    old[3] = math.nan
    now[3] = math.inf
    correction = RolloutCorrectionConfig(rollout_is=level)
    full = diffusion_batch(rollout, old_log_probs=old, advantages=advantages)
    batch, bag = apply_rollout_correction_to_diffusion_batch(full, correction)
    value, gradient, metrics = value_and_gradient(loss_config(correction), now, batch)
    assert math.isfinite(value)
    assert gradient[[1, 3]].tolist() == [[0.0], [0.0]]
    assert (gradient[[0, 2, 4, 5]] != 0).any()
    assert torch.isfinite(gradient).all()
    assert all(math.isfinite(x) for x in [*bag.compute().values(), *metrics.compute().values()])


@pytest.mark.parametrize("advantage", [2.0, -2.0, 0.0])
@pytest.mark.parametrize("move", [100.0, 800.0, 5000.0, -100.0, -5000.0])
@pytest.mark.parametrize("correction", LOSSES[:1] + LOSSES[2:])
def test_a_huge_but_finite_log_ratio_poisons_nothing(advantage, move, correction):
    """exp(100) is inf in fp32, and inf x 0 would be nan in the value (A = 0) or the gradient (A
    > 0).
    """
    rollout, _, now, advantages = (x.float() for x in drawn(shape=(4, 1)))
    now[1] = rollout[1] + move
    advantages[1] = advantage
    value, gradient, metrics = value_and_gradient(
        loss_config(correction), now, bypass(rollout, advantages)
    )
    assert math.isfinite(value)
    assert torch.isfinite(gradient).all()
    assert not [name for name, x in metrics.compute().items() if math.isnan(x)]


def test_everything_rejected_is_a_loss_of_zero():
    rollout, _, now, advantages = drawn()
    for loss_type in ("ppo_clip", "reinforce"):
        correction = RolloutCorrectionConfig(
            bypass_mode=True, loss_type=loss_type, rollout_rs="token_k1", rollout_rs_threshold="5_6"
        )
        value, gradient, metrics = value_and_gradient(
            loss_config(correction), now, bypass(rollout, advantages)
        )
        assert value == 0
        assert torch.count_nonzero(gradient) == 0
        values = metrics.compute()
        assert "clip_fraction" not in values
        assert values["pg_loss"] == 0
        assert values["rollout_corr/rollout_rs_masked_fraction"] == 1


def test_a_mask_on_the_batch_also_holds_in_bypass():
    rollout, _, now, advantages = drawn()
    mask = torch.ones(8, 3, dtype=torch.bool)
    mask[0] = False
    mask[3, 1] = False
    batch = bypass(rollout, advantages).replace(rejection_mask=mask)
    expect = gradient_of(lambda x: ppo(x, rollout, advantages, CLIP)[mask].sum() / 24, now)
    config = loss_config(RolloutCorrectionConfig(bypass_mode=True))
    assert_same(value_and_gradient(config, now, batch)[:2], expect)


# --- Denominator, pieces, errors


@pytest.mark.parametrize(("normalize", "all_count"), [(None, True), ("all", True), ("kept", False)])
def test_rejected_steps_stay_in_the_denominator_unless_only_kept_ones_count(normalize, all_count):
    rollout, _, now, advantages = drawn()
    rule = Rule(bands=bands_of("token_k1"))
    correction = RolloutCorrectionConfig(
        bypass_mode=True, **settings(rule) | {"normalize": normalize}
    )
    kept = torch.tensor(expected(now, rollout, everything(now), rule).kept)
    value, _, metrics = value_and_gradient(
        loss_config(correction), now, bypass(rollout, advantages)
    )
    total = ppo(now, rollout, advantages, CLIP)[kept].sum().item()
    expect = total / (24 if all_count else kept.sum().item())
    assert value == pytest.approx(expect, abs=1e-13)
    assert metrics.compute()["pg_loss"] == pytest.approx(expect, abs=1e-13)


STEPWISE = Rule("token", bands=(("token_k1", 0.7, 1.5),))
SPLIT = [
    (STEPWISE, {"bypass_mode": True}),
    (STEPWISE, REINFORCE),
    (STEPWISE._replace(normalise=True), REINFORCE),
    (STEPWISE._replace(mode="icepop", lower=0.6, upper=1.5, normalise=True), REINFORCE),
    (Rule("sequence", upper=1.3, normalise=True), {}),
    (Rule("geometric", "mask", 0.8, 1.2), {}),
]


def summed(config: LossConfig, now: Tensor, batches: list[DiffusionBatch], reduce=None):
    """Sums as the update does: each SDE step of each micro-batch alone, then one division."""
    leaf = now.detach().clone().requires_grad_()
    bag = MetricBag()
    parts = torch.zeros(3).double()
    start = 0
    total = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        for t in range(batch.num_steps):
            rows = leaf[start : start + len(batch), t : t + 1]
            terms = DiffusionObjective(config).terms(rows, batch.step(t))
            terms.total.backward()
            total, parts = total + terms.total.detach(), parts + terms.parts
            bag.merge(terms.metrics)
        start += len(batch)
    add = reduce["sum"] if reduce else lambda value: value
    scale = denominator(parts, add)
    return (add(total) / scale).item(), leaf.grad / scale, bag


def filled(config: LossConfig, rows: slice = slice(None), **options) -> DiffusionBatch:
    rollout, old, _, advantages = (x[rows] for x in drawn())
    if config.rollout_correction.bypass_mode:
        return bypass(rollout, advantages)
    full = diffusion_batch(rollout, old_log_probs=old, advantages=advantages)
    return apply_rollout_correction_to_diffusion_batch(full, config.rollout_correction, **options)[
        0
    ]


@pytest.mark.parametrize(("rule", "mode"), SPLIT)
@pytest.mark.parametrize("normalize", ["all", "kept"])
@pytest.mark.parametrize("cuts", [[4], [1, 2, 7]])
def test_micro_batches_and_steps_add_up(rule, mode, normalize, cuts):
    """Batches are split by rows and, if no level spans the window, by SDE steps as the trainer
    does.
    """
    rollout, old, now, advantages = drawn()
    config = loss_config(
        RolloutCorrectionConfig(**settings(rule) | mode | {"normalize": normalize})
    )
    batch = filled(config)
    *found, bag = summed(config, now, pieces(batch, cuts))
    assert_same(found, reference(config, rule, now, rollout, old, advantages))
    values = bag.compute()
    expect = diffusion_loss(config, now, batch)[1].compute()
    spans_the_window = {
        name for name in expect if "ppl" in name or "seq" in name or name.endswith("rejected_ratio")
    }
    compared = {name: expect[name] for name in expect.keys() - spans_the_window}
    assert {name: values[name] for name in compared} == pytest.approx(compared, abs=1e-12)


@pytest.mark.parametrize(("rule", "mode"), SPLIT)
@pytest.mark.parametrize("normalize", ["all", "kept"])
@pytest.mark.parametrize(
    "parts", [[slice(0, 3), slice(3, 8)], [slice(0, 1), slice(1, 2), slice(2, 8)]]
)
def test_processes_add_up(rule, mode, normalize, parts):
    rollout, old, now, advantages = drawn()
    config = loss_config(
        RolloutCorrectionConfig(**settings(rule) | mode | {"normalize": normalize})
    )
    expect = reference(config, rule, now, rollout, old, advantages)

    def work(rank, reduce):
        batch = filled(config, parts[rank], all_reduce=reduce["sum"])
        return summed(config, now[parts[rank]], [batch], reduce)[:2]

    results = on_shards(len(parts), work)
    gradient = torch.cat([gradient for _, gradient in results])
    for loss, _ in results:
        assert_same((loss, gradient), expect)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_advantages_beyond_the_clip_count_as_the_clip(dtype):
    rollout, _, now, _ = (x.to(dtype) for x in drawn())
    config = loss_config(RolloutCorrectionConfig(bypass_mode=True), adv_clip=2.0)
    wild = torch.tensor(
        [1e6, -1e6, math.inf, -math.inf, 2.0, -2.0, 1.0, 0.0], dtype=torch.float64
    ).reshape(8, 1)
    held = torch.tensor([2, -2, 2, -2, 2, -2, 1, 0], dtype=torch.float64).reshape(8, 1)
    found, expect = (
        value_and_gradient(config, now, bypass(rollout, a.expand(8, 3))) for a in (wild, held)
    )
    assert found[0] == expect[0]
    assert torch.equal(found[1], expect[1])
    assert found[1].dtype == dtype


def test_missing_columns_are_errors():
    rollout, _, now, advantages = drawn()
    decoupled = RolloutCorrectionConfig()
    bypassed = RolloutCorrectionConfig(bypass_mode=True)
    with pytest.raises(ValueError, match="advantages"):
        diffusion_loss(loss_config(decoupled), now, diffusion_batch(rollout, old_log_probs=rollout))
    with pytest.raises(ValueError, match="old_log_probs"):
        diffusion_loss(loss_config(decoupled), now, diffusion_batch(rollout, advantages=advantages))
    without = diffusion_batch(None, shape=(8, 3), old_log_probs=rollout, advantages=advantages)
    with pytest.raises(ValueError, match=r"rollout\.calculate_log_probs"):
        diffusion_loss(loss_config(bypassed), now, without)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"loss_mode": "grpo"}, "loss_mode"),
        ({"kl_threshold": 1e-4}, "kl_threshold"),
        ({"loss_mode": "flow_dppo", "kl_threshold": 0.0}, "kl_threshold"),
        ({"loss_mode": "flow_dppo", "clip_ratio": 1e-3}, "clip_ratio"),
        ({"clip_ratio": 0.0}, "clip_ratio"),
        ({"clip_ratio": 1.0}, "clip_ratio"),
        ({"clip_ratio": math.nan}, "clip_ratio"),
        ({"adv_clip_max": 0.0}, "adv_clip_max"),
        ({"adv_clip_max": math.nan}, "adv_clip_max"),
    ],
)
def test_wrong_loss_settings_name_the_key(settings, key):
    with pytest.raises(ValueError, match=rf"actor\.diffusion_loss\.{key}"):
        DiffusionLossConfig(**settings).validate()


def test_the_default_loss_settings_are_those_of_the_recipe():
    DiffusionLossConfig().validate()
    assert (DiffusionLossConfig().clip_ratio, DiffusionLossConfig().adv_clip_max) == (1e-4, 5.0)
