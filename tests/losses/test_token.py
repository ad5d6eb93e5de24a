"""token_loss: value and gradient against independent formulas; micro-batches add up."""

import math

import pytest
import torch
from support import oracles
from support.builders import (
    assert_same,
    gradient_of,
    loss_config,
    mask_of,
    on_shards,
    pieces,
    reference_loss,
    settings,
    summed,
    token_batch,
)
from support.compositions import resolved
from support.oracles import Clip, Rule
from torch import Tensor

from flowgrpo_rc import (
    LossConfig,
    RolloutCorrectionConfig,
    TokenBatch,
    TokenLossConfig,
    apply_bypass_mode,
    apply_rollout_correction_to_batch,
    token_loss,
)
from flowgrpo_rc.algorithms.policy_gradient.text import TokenObjective
from flowgrpo_rc.config.compose import compose_config, to_config
from flowgrpo_rc.losses.config import AGGREGATIONS

CLIP = Clip(0.15, 0.25, 1.5)
SETTINGS = {"clip_ratio_low": 0.15, "clip_ratio_high": 0.25, "clip_ratio_c": 1.5}
BAND = (("token_k1", 0.7, 1.6),)
REINFORCE = {"bypass_mode": True, "loss_type": "reinforce"}


def drawn(scale: float = 0.3) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draws rollout, old and current log-probs, and advantages that are the same along a row;
    float64.
    """
    source = torch.Generator().manual_seed(4)
    rollout, *moves, advantages = (
        torch.randn(6, 4, generator=source, dtype=torch.float64) for _ in range(4)
    )
    old = rollout + scale * moves[0]
    return rollout, old, old + scale * moves[1], 1.5 * advantages[:, :1].expand(6, 4)


def filled(config: LossConfig, masking: str) -> TokenBatch:
    """Makes a batch that is ready for the loss, before any decoupled correction."""
    rollout, old, _, advantages = drawn()
    batch = token_batch(rollout, mask_of(masking), advantages=advantages)
    return (
        apply_bypass_mode(batch)
        if config.rollout_correction.bypass_mode
        else batch.replace(old_log_probs=old)
    )


def corrected(config: LossConfig, batch: TokenBatch, **options) -> TokenBatch:
    if config.rollout_correction.bypass_mode:
        return batch
    return apply_rollout_correction_to_batch(batch, config.rollout_correction, **options)[0]


def found_for(config: LossConfig, batch: TokenBatch, now: Tensor) -> tuple[float, Tensor]:
    return gradient_of(lambda x: token_loss(config, x, batch)[0], now)


def config_of(
    rule: Rule, mode: dict, aggregation: str = "token-mean", normalize: str | None = None
) -> LossConfig:
    written = settings(rule) | {"normalize": normalize} | mode
    correction = RolloutCorrectionConfig(**written)
    correction.validate()
    return loss_config(correction, loss_agg_mode=aggregation, **SETTINGS)


def reference(config: LossConfig, rule: Rule, masking: str) -> tuple[float, Tensor]:
    rollout, old, now, advantages = drawn()
    normalize = config.rollout_correction.normalize
    total = reference_loss(
        config,
        rule._replace(over_kept=normalize == "kept"),
        *(rollout, old, advantages, mask_of(masking)),
        clip=CLIP,
        aggregation=config.token_loss.loss_agg_mode,
        counts_kept=normalize != "all",
    )
    return gradient_of(total, now)


# --- Against the formula

CASES = [
    (Rule(), {}),
    (Rule("token", upper=1.2, bands=BAND), {}),
    (Rule("sequence", "mask", 0.6, 1.5, veto=0.6, normalise=True), {}),
    (Rule("geometric", "clip", 0.9, 1.1, bands=(("seq_mean_k3", 0.0, 0.05),), normalise=True), {}),
    (Rule(), {"bypass_mode": True}),
    (Rule("sequence", bands=BAND, veto=0.5), {"bypass_mode": True}),
    (Rule(), REINFORCE),
    (Rule("sequence", bands=BAND, normalise=True), REINFORCE),
    (Rule("token", "mask", 0.7, 1.4, normalise=True), REINFORCE),
]


@pytest.mark.parametrize(("rule", "mode"), CASES)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize(("normalize", "masking"), [(None, "right"), ("all", "empty")])
def test_loss_and_gradient(rule, mode, aggregation, normalize, masking):
    config = config_of(rule, mode, aggregation, normalize)
    batch = corrected(config, filled(config, masking))
    actual = found_for(config, batch, drawn()[2])
    assert_same(actual, reference(config, rule, masking))
    assert torch.count_nonzero(actual[1][~mask_of(masking)]) == 0


def test_pure_importance_sampling_sums_over_a_response():
    """-E[w sum_t log pi(t) A], with one weight w of at most 2 for each response."""
    run = resolved(to_config(compose_config(["+correction=pure_is"], config_name="token_grpo")))
    config = run.loss_config
    batch, mask, now = filled(config, "right"), mask_of("right"), drawn()[2]
    rollout, advantages = batch.rollout_log_probs, batch.advantages
    weight_B = (now - rollout).where(mask, 0).sum(1).exp().clamp(max=2)

    def total(log_probs: Tensor) -> Tensor:
        return -(weight_B * (log_probs * advantages).where(mask, 0).sum(1)).mean()

    actual, expected = found_for(config, batch, now)[1], gradient_of(total, now)[1]
    assert torch.allclose(actual, expected, rtol=1e-12)
    assert weight_B.max() == 2


# --- Clips


@pytest.mark.parametrize(
    ("advantage", "ratio", "counted"),
    [
        (1.0, 1.3, 1.25),
        (1.0, 1.2, None),
        (1.0, 0.5, None),
        (-1.0, 0.8, 0.85),
        (-1.0, 0.9, None),
        (-1.0, 1.4, None),
        (-1.0, 1.6, 1.5),
        (1.0, 1.6, 1.25),
        (-1.0, 100.0, 1.5),
    ],
)
def test_the_clip_has_two_widths_and_a_bound_for_negative_advantages(advantage, ratio, counted):
    """`counted` is the ratio in the loss if there is no gradient; None if it is the ratio
    itself.
    """
    rollout = torch.zeros(1, 1, dtype=torch.float64)
    one = torch.ones(1, 1, dtype=torch.float64)
    batch = apply_bypass_mode(token_batch(rollout, one.bool(), advantages=advantage * one))
    config = config_of(Rule(), {"bypass_mode": True})
    actual = found_for(config, batch, math.log(ratio) * one)
    assert actual[0] == pytest.approx(-advantage * (counted or ratio), abs=1e-14)
    assert actual[1].item() == pytest.approx(0 if counted else -advantage * ratio, abs=1e-14)
    values = token_loss(config, math.log(ratio) * one, batch)[1].compute()
    assert values["dual_clip_fraction"] == (advantage < 0 and ratio > 1.5)
    assert values["clip_fraction_higher"] == (ratio > 1.25)
    assert values["clip_fraction_lower"] == (ratio < 0.85)


# --- GSPO


@pytest.mark.parametrize("masking", ["full", "right", "empty", "holes"])
@pytest.mark.parametrize("bypass", [True, False])
@pytest.mark.parametrize("criterion", [None, "seq_mean_k1", "token_k1"])
def test_gspo_is_the_clipped_loss_of_one_ratio_for_a_sequence(masking, bypass, criterion):
    """The oracle takes value and gradient through exp(mean log-ratio), not through the token
    form.
    """
    rule = Rule(bands=() if criterion is None else ((criterion, 0.7, 1.25),))
    rollout, old, now, advantages = drawn()
    correction = RolloutCorrectionConfig(**settings(rule), bypass_mode=bypass)
    clip = {"clip_ratio_low": 0.05, "clip_ratio_high": 0.1, "clip_ratio_c": None}
    config = loss_config(correction, loss_mode="gspo", loss_agg_mode="seq-mean-token-mean", **clip)
    batch = corrected(config, filled(config, masking))
    mask = mask_of(masking).tolist()
    kept = oracles.correction((now if bypass else old).tolist(), rollout.tolist(), mask, rule).kept
    anchor = rollout if bypass else old
    per_row = advantages[:, 0].tolist()
    expect = gradient_of(lambda x: oracles.gspo(x, anchor, per_row, kept, Clip(0.05, 0.1)), now)
    actual = found_for(config, batch, now)
    assert_same(actual, expect)


# --- Pieces


@pytest.mark.parametrize(("rule", "mode"), CASES)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_micro_batches_add_up(rule, mode, aggregation):
    config = config_of(rule, mode, aggregation, "kept")
    batch = corrected(config, filled(config, "empty"))
    now = drawn()[2]
    expect = reference(config, rule, "empty")
    whole = token_loss(config, now, batch)[1].compute()
    for cuts in ([3], [1, 2, 4]):
        *actual, bag = summed(TokenObjective(config), now, pieces(batch, cuts))
        assert_same(actual, expect)
        assert bag.compute() == pytest.approx(whole, rel=0, abs=1e-12)


@pytest.mark.parametrize(("rule", "mode"), CASES)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_processes_add_up(rule, mode, aggregation):
    """Row 1 is empty; it is a process of its own, which has nothing to add."""
    config = config_of(rule, mode, aggregation, "kept")
    shards = pieces(filled(config, "empty"), [1, 2])
    expect = reference(config, rule, "empty")
    now = list(drawn()[2].split([len(shard) for shard in shards]))

    def work(rank, reduce):
        batch = corrected(config, shards[rank], all_reduce=reduce["sum"])
        halves = pieces(batch, [len(batch) // 2]) if len(batch) > 1 else [batch]
        loss, gradient, bag = summed(TokenObjective(config), now[rank], halves, reduce=reduce)
        return loss, gradient, bag.compute(reduce["sum"], reduce["max"])

    results = on_shards(len(shards), work)
    gradient = torch.cat([actual[1] for actual in results])
    for loss, _, values in results:
        assert_same((loss, gradient), expect)
        assert values == pytest.approx(results[0][2], rel=0, abs=0)


# --- What takes no part


@pytest.mark.parametrize(("rule", "mode"), CASES)
def test_values_under_the_padding_are_never_read(rule, mode):
    bad = math.nan
    config = config_of(rule, mode)
    batch = filled(config, "right")
    now = drawn()[2]
    mask = mask_of("right")
    names = ("rollout_log_probs", "old_log_probs", "advantages")
    dirty = batch.replace(**{name: torch.where(mask, getattr(batch, name), bad) for name in names})
    expect = found_for(config, corrected(config, batch), now)
    actual = found_for(config, corrected(config, dirty), torch.where(mask, now, bad))
    assert actual[0] == expect[0]
    assert torch.equal(actual[1], expect[1])


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("mode", [{"bypass_mode": True}, REINFORCE])
def test_everything_rejected_is_a_loss_of_zero(aggregation, mode):
    config = config_of(Rule("token", bands=(("token_k1", 50.0, 60.0),)), mode, aggregation)
    batch = filled(config, "right")
    now = drawn()[2]
    value, gradient = found_for(config, batch, now)
    assert value == 0
    assert torch.count_nonzero(gradient) == 0
    values = token_loss(config, now, batch)[1].compute()
    assert values["rollout_corr/rollout_rs_masked_fraction"] == 1
    assert "pg_loss" not in values


# --- Metrics and settings


@pytest.mark.parametrize(
    ("metric_names", "names"), [("verl", ("ratio_mean",)), ("slime", ("ois",))]
)
def test_the_ratio_to_old_has_slime_s_name_in_decoupled_mode(metric_names, names):
    """`ois` is exp(training - old). As slime's table says, only decoupled mode has it."""
    for mode in ({}, {"bypass_mode": True}):
        config = config_of(Rule(), mode | {"metric_names": metric_names})
        values = token_loss(config, drawn()[2], corrected(config, filled(config, "right")))[
            1
        ].compute()
        expect = names if not mode else ("ratio_mean",)
        assert {"ratio_mean", "ois"} & values.keys() == set(expect)
    both = config_of(Rule(), {"metric_names": "both"})
    values = token_loss(both, drawn()[2], corrected(both, filled(both, "right")))[1].compute()
    _, old, now, _ = drawn()
    ratios = (now - old).exp()[mask_of("right")].mean().item()
    assert values["ratio_mean"] == values["ois"] == pytest.approx(ratios)


@pytest.mark.parametrize("metric_names", ["verl", "slime", "both"])
def test_in_bypass_mode_the_correction_reports_under_its_prefix(metric_names):
    rule = Rule("sequence", bands=BAND, normalise=True)
    config = config_of(rule, REINFORCE | {"metric_names": metric_names})
    values = token_loss(config, drawn()[2], filled(config, "right"))[1].compute()
    rollout, _, now, _ = drawn()
    expect = oracles.correction(
        now.tolist(), rollout.tolist(), mask_of("right").tolist(), rule
    ).metrics
    for old, new in (
        ("kl", "mismatch_kl"),
        ("rollout_is_batch_norm_factor", "mis_batch_norm_factor"),
    ):
        for name, shown in ((old, metric_names != "slime"), (new, metric_names != "verl")):
            actual = values.get(f"rollout_corr/{name}")
            assert actual == (pytest.approx(expect[old], abs=1e-12) if shown else None)


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"loss_mode": "grpo"}, "loss_mode"),
        ({"loss_agg_mode": "mean"}, "loss_agg_mode"),
        ({"clip_ratio_low": 0.0}, "clip_ratio_low"),
        ({"clip_ratio_low": 1.0}, "clip_ratio_low"),
        ({"clip_ratio_high": 0.0}, "clip_ratio_high"),
        ({"clip_ratio_high": math.nan}, "clip_ratio_high"),
        ({"clip_ratio_c": 1.2}, "clip_ratio_c"),
        ({"clip_ratio_c": math.nan}, "clip_ratio_c"),
    ],
)
def test_wrong_loss_settings_name_the_key(given, key):
    with pytest.raises(ValueError, match=rf"actor\.token_loss\.{key}"):
        TokenLossConfig(**given).validate()
