"""diffusion_loss: value, gradient and metrics against independent formulas."""

import itertools
import math

import pytest
import torch
from support import oracles
from support.builders import (
    assert_same,
    diffusion_batch,
    gradient_of,
    loss_config,
    on_shards,
    pieces,
    reference_loss,
    settings,
    summed,
)
from support.oracles import LEVELS, Clip, Rule
from torch import Tensor

from flowgrpo_rc import (
    LossConfig,
    RolloutCorrectionConfig,
    apply_bypass_mode_to_diffusion_batch,
    apply_rollout_correction_to_diffusion_batch,
    diffusion_loss,
)
from flowgrpo_rc.algorithms.policy_gradient.images import DiffusionObjective
from flowgrpo_rc.batch import DiffusionBatch
from flowgrpo_rc.core.metrics import MetricBag

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


def filled(config: LossConfig, rows: slice = slice(None), **options) -> DiffusionBatch:
    """Makes a batch that is ready for the loss."""
    rollout, old, _, advantages = (x[rows] for x in drawn())
    if config.rollout_correction.bypass_mode:
        return bypass(rollout, advantages)
    full = diffusion_batch(rollout, old_log_probs=old, advantages=advantages)
    return apply_rollout_correction_to_diffusion_batch(full, config.rollout_correction, **options)[
        0
    ]


def value_and_gradient(
    config: LossConfig, log_probs: Tensor, batch: DiffusionBatch
) -> tuple[float, Tensor, MetricBag]:
    actual = gradient_of(lambda x: diffusion_loss(config, x, batch)[0], log_probs)
    return *actual, diffusion_loss(config, log_probs, batch)[1]


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


MODES = {"decoupled": {}, "bypass": {"bypass_mode": True}, "reinforce": REINFORCE}
BANDS = {
    "nothing": (),
    "token_k1": (("token_k1", 0.75, 1.4),),
    "seq_mean_k1": (("seq_mean_k1", 0.75, 1.4),),
    "seq_max_k2": (("seq_max_k2", 0.0, 0.12),),
}


# --- Against the formula


# Mode, level of the weights, and whether they are normalised where there are some.
WEIGHTS = [
    *((mode, level, False) for mode in MODES for level in (None, *LEVELS)),
    *((mode, level, True) for mode in ("decoupled", "reinforce") for level in LEVELS),
]


@pytest.mark.parametrize(("mode", "level", "normalised"), WEIGHTS)
@pytest.mark.parametrize(("criterion", "normalize"), [*zip(BANDS, [None, "kept"] * 2, strict=True)])
def test_value_and_gradient(mode, level, normalised, criterion, normalize):
    """In bypass mode with PPO's clip weights are metrics: current / rollout is the weight."""
    rollout, old, now, advantages = drawn()
    rule = Rule(level, upper=1.2, bands=BANDS[criterion], normalise=normalised)
    written = settings(rule) | MODES[mode] | {"normalize": normalize}
    config = loss_config(RolloutCorrectionConfig(**written), adv_clip=ADV_CLIP)
    held = advantages.clamp(-ADV_CLIP, ADV_CLIP)
    actual = value_and_gradient(config, now, filled(config))
    assert_same(actual[:2], reference(config, rule, now, rollout, old, held))
    assert actual[2].compute()["pg_loss"] == pytest.approx(actual[0], abs=1e-13)


# --- PPO clip


def test_clip_fractions_and_ratio_moments():
    """The moments keep their digits where ratios are 1 + 1e-7."""
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
    rollout, _, now, advantages = drawn(scale=1e-7)
    values = value_and_gradient(config, now, bypass(rollout, advantages))[2].compute()
    moves = [math.expm1(x) for x in (now - rollout).flatten().tolist()]
    assert values["ratio_std"] == pytest.approx(oracles.std(moves), rel=1e-8)


# --- Selection

LOSSES = [
    RolloutCorrectionConfig(bypass_mode=True),
    RolloutCorrectionConfig(
        bypass_mode=True, rollout_is="sequence", rollout_rs="token_k1", rollout_rs_threshold=3.0
    ),
    *(RolloutCorrectionConfig(**REINFORCE, rollout_is=level) for level in (None, *LEVELS[:2])),
    RolloutCorrectionConfig(bypass_mode=True, normalize="kept", rollout_token_veto_threshold=1e-9),
]


@pytest.mark.parametrize("correction", LOSSES)
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
def test_a_row_that_is_not_finite_leaves_everything_else_as_it_was(correction, current, rolled):
    rollout, _, now, advantages = drawn(shape=(6, 1))
    rollout[2] = rolled
    now[2] = current
    others = torch.tensor([0, 1, 3, 4, 5])
    config = loss_config(correction)
    actual = value_and_gradient(config, now, bypass(rollout, advantages))
    without = value_and_gradient(config, now[others], bypass(rollout[others], advantages[others]))
    share = 1 if correction.normalize == "kept" else 5 / 6
    accuracy = 1e-13
    assert actual[0] == pytest.approx(without[0] * share, rel=accuracy)
    torch.testing.assert_close(actual[1][others], without[1] * share, rtol=accuracy, atol=0)
    assert actual[1][2].item() == 0
    assert all(math.isfinite(value) for value in actual[2].compute().values())


# --- Denominator, pieces, errors


STEPWISE = Rule("token", bands=(("token_k1", 0.7, 1.5),))
SPLIT = [
    (STEPWISE, {"bypass_mode": True}),
    (STEPWISE, REINFORCE),
    (STEPWISE._replace(normalise=True), REINFORCE),
    (STEPWISE._replace(mode="icepop", lower=0.6, upper=1.5, normalise=True), REINFORCE),
    (Rule("sequence", upper=1.3, normalise=True), {}),
    (Rule("geometric", "mask", 0.8, 1.2), {}),
]


@pytest.mark.parametrize(("rule", "mode"), SPLIT)
@pytest.mark.parametrize("normalize", ["all", "kept"])
def test_micro_batches_steps_and_processes_add_up(rule, mode, normalize):
    """Batches are split by rows and by SDE steps, as the trainer does; then over processes."""
    cuts = [1, 2, 7]
    rollout, old, now, advantages = drawn()
    written = settings(rule) | mode | {"normalize": normalize}
    config = loss_config(RolloutCorrectionConfig(**written))
    objective = DiffusionObjective(config)
    batch = filled(config)
    expect = reference(config, rule, now, rollout, old, advantages)
    *actual, bag = summed(objective, now, pieces(batch, cuts), by_step=True)
    assert_same(actual, expect)
    whole = diffusion_loss(config, now, batch)[1].compute()
    values = bag.compute()
    of_windows = ("ppl", "seq", "rejected_ratio")
    compared = {n: x for n, x in whole.items() if not any(word in n for word in of_windows)}
    assert {name: values[name] for name in compared} == pytest.approx(compared, abs=1e-12)

    rows = [slice(*edges) for edges in itertools.pairwise([0, *cuts[:2], 8])]

    def work(rank, reduce):
        share = filled(config, rows[rank], all_reduce=reduce["sum"])
        return summed(objective, now[rows[rank]], [share], by_step=True, reduce=reduce)[:2]

    results = on_shards(len(rows), work)
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
    actual, expect = (
        value_and_gradient(config, now, bypass(rollout, a.expand(8, 3))) for a in (wild, held)
    )
    assert actual[0] == expect[0]
    assert torch.equal(actual[1], expect[1])
    assert actual[1].dtype == dtype


def test_missing_columns_are_errors():
    rollout, _, now, advantages = drawn()
    decoupled = RolloutCorrectionConfig()
    bypassed = RolloutCorrectionConfig(bypass_mode=True)
    with pytest.raises(ValueError, match="advantages"):
        diffusion_loss(loss_config(decoupled), now, diffusion_batch(rollout, old_log_probs=rollout))
    with pytest.raises(ValueError, match="old_log_probs"):
        diffusion_loss(loss_config(decoupled), now, diffusion_batch(rollout, advantages=advantages))
    without = diffusion_batch(None, shape=(8, 3), old_log_probs=rollout, advantages=advantages)
    with pytest.raises(ValueError, match="needs rollout_log_probs"):
        diffusion_loss(loss_config(bypassed), now, without)
