"""What holds for every batch.

Hypothesis draws shapes, masks, dtypes, extreme and non-finite values, and settings.
"""

import math
from functools import partial
from typing import NamedTuple

import hypothesis
import torch
from hypothesis import strategies as st
from support.builders import loss_config, run, settings, token_batch
from support.oracles import CRITERIA, LEVELS, MODES, SAFETY, Rule
from torch import Tensor

from flowgrpo_rc import (
    RolloutCorrectionConfig,
    apply_bypass_mode,
    apply_rollout_correction_to_batch,
    token_loss,
)
from flowgrpo_rc.losses.config import AGGREGATIONS

every = partial(hypothesis.settings, derandomize=True, deadline=None, database=None)

ORDINARY = st.floats(-3, 3, allow_subnormal=False)
EXTREME = st.sampled_from(
    [-1e4, -700.0, -30.0, -1.0, -1e-4, -1e-8, 0.0, 1e-8, 1e-4, 0.5, 1.0, 30.0, 700.0, 1e4]
)
NOT_FINITE = st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -1.0, 1e4])
DTYPES = st.sampled_from([torch.float64, torch.float32, torch.bfloat16])


class Case(NamedTuple):
    training: Tensor
    rollout: Tensor
    mask: Tensor


@st.composite
def cases(draw, values, dtypes=DTYPES) -> Case:
    """Draws log-probs [B, T] with B up to 4 and T up to 5; some rows or all of them may be
    empty.
    """
    rows = draw(st.integers(1, 4))
    columns = draw(st.integers(1, 5))
    dtype = draw(dtypes)

    def table(entries):
        listed = draw(st.lists(entries, min_size=rows * columns, max_size=rows * columns))
        return torch.tensor(listed).reshape(rows, columns)

    return Case(table(values).to(dtype), table(values).to(dtype), table(st.booleans()))


@st.composite
def rules(draw) -> Rule:
    """Draws settings. No sum or product of the values above meets one of their bounds."""
    level = draw(st.sampled_from([None, *LEVELS]))
    mode = draw(st.sampled_from(MODES)) if level else "truncate"
    bands = tuple(
        (name, 0.613, 1.717)
        for name in draw(st.lists(st.sampled_from(CRITERIA), max_size=2, unique=True))
    )
    return Rule(
        level,
        mode,
        0.0 if mode == "truncate" else 0.5321,
        1.6421 if level else 2.0,
        bands,
        veto=draw(st.sampled_from([None, 0.0123])),
        normalise=level is not None and draw(st.booleans()),
        over_kept=draw(st.booleans()),
    )


def check_metrics(values: dict[str, float]) -> None:
    assert not [name for name, value in values.items() if math.isnan(value)]
    for name, value in values.items():
        if "fraction" in name or name in ("rejected_ratio", "rollout_is_oob_ratio"):
            assert 0 <= value <= 1, name
        if (
            name.endswith("_std")
            or "k3" in name
            or "_k2_" in name
            or "abs_diff" in name
            or name.startswith("ppl")
        ):
            assert value >= 0, name
    assert 0 <= values.get("rollout_is_eff_sample_size", 0) <= 1 + 1e-12
    assert values.get("rollout_is_min", 0) <= values.get("rollout_is_max", 0)


@every(max_examples=60)
@hypothesis.given(cases(EXTREME | NOT_FINITE | ORDINARY), rules())
def test_weights_masks_and_metrics_are_always_sound(case, rule):
    actual = run(*case, rule)
    check_metrics(actual.metrics.compute())
    valid = case.mask & torch.isfinite(case.training.double() - case.rollout.double())
    assert not (actual.mask & ~valid).any()
    if actual.weights is None:
        return
    assert actual.weights.dtype == case.training.dtype
    weights = actual.weights.double()
    assert torch.isfinite(weights).all()
    assert torch.count_nonzero(weights[~valid]) == 0
    if rule.normalise:
        assert (weights >= 0).all()
        return
    inside = weights[valid]
    highest = {"mask": math.exp(SAFETY)}.get(rule.mode, rule.upper)
    lowest = {"clip": rule.lower, "icepop": 0.0}.get(rule.mode, math.exp(-SAFETY))
    rounding = {torch.bfloat16: 2**-8}.get(case.training.dtype, 1e-6)
    assert ((inside <= highest * (1 + rounding)) & (inside >= lowest * (1 - rounding))).all()
    if rule.mode == "icepop":
        assert ((inside == 0) | (inside >= rule.lower * (1 - rounding))).all()


def loss_of(
    case: Case, rule: Rule, mode: dict, aggregation: str, normalize: str
) -> tuple[Tensor, Tensor, dict]:
    correction = RolloutCorrectionConfig(**settings(rule) | mode | {"normalize": normalize})
    now = case.training.detach().clone().requires_grad_()
    advantages = torch.linspace(-2, 2, case.mask.numel()).reshape(case.mask.shape)
    batch = token_batch(case.rollout, case.mask, advantages=advantages)
    if correction.bypass_mode:
        batch = apply_bypass_mode(batch)
    else:
        batch, _ = apply_rollout_correction_to_batch(
            batch.replace(old_log_probs=case.training), correction
        )
    loss, metrics = token_loss(loss_config(correction, loss_agg_mode=aggregation), now, batch)
    loss.backward()
    return loss, now.grad, metrics.compute()


BYPASS = {"bypass_mode": True}
REINFORCE = {"bypass_mode": True, "loss_type": "reinforce"}


@every(max_examples=60)
@hypothesis.given(
    cases(EXTREME | NOT_FINITE, st.sampled_from([torch.float64, torch.float32])),
    rules(),
    st.sampled_from([{}, BYPASS, REINFORCE]),
    st.sampled_from(AGGREGATIONS),
    st.sampled_from(["all", "kept"]),
)
def test_loss_and_gradient_are_always_finite(case, rule, mode, aggregation, normalize):
    if mode == BYPASS:
        rule = rule._replace(normalise=False, level=None, mode="truncate", lower=0.0)
    loss, gradient, metrics = loss_of(case, rule, mode, aggregation, normalize)
    assert torch.isfinite(loss)
    assert torch.isfinite(gradient).all()
    assert torch.count_nonzero(gradient[~case.mask]) == 0
    check_metrics({name.removeprefix("rollout_corr/"): value for name, value in metrics.items()})
