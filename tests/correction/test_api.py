"""The public functions: they agree with the core, check their inputs and correct whole batches."""

import math
from collections.abc import Callable
from inspect import signature

import pytest
import torch
from support.builders import (
    diffusion_batch,
    expected,
    log_probs,
    mask_of,
    run,
    settings,
    tensor,
    token_batch,
)
from support.oracles import LEVELS, Rule
from torch import Tensor

from flowgrpo_rc import (
    DiffusionBatch,
    RolloutCorrectionConfig,
    apply_bypass_mode,
    apply_bypass_mode_to_diffusion_batch,
    apply_rollout_correction_to_batch,
    apply_rollout_correction_to_diffusion_batch,
    compute_offpolicy_metrics,
    compute_rollout_correction_and_rejection_mask,
    compute_rollout_correction_weights,
    compute_rollout_rejection_mask,
)


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int64, torch.float32])
def test_the_public_function_is_the_core_with_a_prefix(mask_dtype):
    training, rollout = log_probs()
    mask = mask_of("left")
    rule = Rule("sequence", bands=(("seq_mean_k1", 0.8, 1.3),), veto=0.4, normalise=True)
    core = run(training, rollout, mask, rule)
    weights, keep_mask, values = compute_rollout_correction_and_rejection_mask(
        training, rollout, mask.to(mask_dtype), **settings(rule)
    )
    assert torch.equal(weights, core.weights)
    assert torch.equal(keep_mask, core.mask.to(mask_dtype))
    assert keep_mask.dtype == mask_dtype
    assert values == {
        f"rollout_corr/{name}": value for name, value in core.metrics.compute().items()
    }


@pytest.mark.parametrize("level", LEVELS)
def test_the_smaller_functions_agree_with_the_whole_correction(level):
    """One step is NaN, one inf."""
    training, rollout = log_probs()
    training[1, 1] = math.nan
    rollout[2, 0] = math.inf
    mask = mask_of("right")
    rs = {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.7_1.5"}
    whole = compute_rollout_correction_and_rejection_mask(
        training, rollout, mask, rollout_is=level, **rs
    )
    difference = training - rollout
    weights = compute_rollout_correction_weights(difference, mask, rollout_is=level)
    assert torch.equal(weights, whole.weights)
    keep_mask = compute_rollout_rejection_mask(difference, mask, **rs)
    assert torch.equal(keep_mask, whole.mask)
    for name, value in compute_offpolicy_metrics(training, rollout, mask).items():
        assert whole.metrics[f"rollout_corr/{name}"] == value


def test_the_defaults_are_those_of_the_configuration():
    parameters = signature(compute_rollout_correction_and_rejection_mask).parameters.values()
    config = RolloutCorrectionConfig()
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.name != "step_kl":
            assert parameter.default == getattr(config, parameter.name), parameter.name
    assert config.rollout_is_threshold == 2.0


def test_bypass_takes_the_rollout_as_old():
    _, rollout = log_probs()
    filled = {"old_log_probs": rollout + 1}
    for batch, apply in (
        (diffusion_batch(rollout, **filled), apply_bypass_mode_to_diffusion_batch),
        (token_batch(rollout, mask_of("right"), **filled), apply_bypass_mode),
    ):
        assert torch.equal(apply(batch).old_log_probs, rollout)
        assert torch.equal(batch.old_log_probs, rollout + 1)


def test_missing_log_probs_say_how_to_get_them():
    _, rollout = log_probs()
    without = diffusion_batch(None, shape=(6, 4), old_log_probs=rollout)
    config = RolloutCorrectionConfig(rollout_is="token")
    with pytest.raises(ValueError, match="needs rollout_log_probs"):
        apply_bypass_mode_to_diffusion_batch(without)
    with pytest.raises(ValueError, match="needs rollout_log_probs"):
        apply_rollout_correction_to_diffusion_batch(without, config)
    with pytest.raises(ValueError, match="old_log_probs"):
        apply_rollout_correction_to_diffusion_batch(diffusion_batch(rollout), config)


@pytest.mark.parametrize("level", [None, *LEVELS])
@pytest.mark.parametrize("text", [False, True])
def test_the_decoupled_correction_of_a_batch_is_old_over_rollout(level, text):
    old, rollout = log_probs()
    rule = Rule(level, bands=(("seq_mean_k1", 0.8, 1.3),), veto=0.3, normalise=level is not None)
    config = RolloutCorrectionConfig(**settings(rule))
    if text:
        mask = mask_of("right")
        full = token_batch(rollout, mask, old_log_probs=old)
        batch, bag = apply_rollout_correction_to_batch(full, config)
    else:
        mask = mask_of("full")
        full = diffusion_batch(rollout, old_log_probs=old)
        batch, bag = apply_rollout_correction_to_diffusion_batch(full, config)
    expect = expected(old, rollout, mask, rule)
    assert batch.rejection_mask.tolist() == expect.kept
    assert (batch.rollout_is_weights is None) == (level is None)
    if level is not None:
        torch.testing.assert_close(
            batch.rollout_is_weights, tensor(expect.weights), rtol=1e-12, atol=0
        )
    assert bag.compute() == pytest.approx(expect.metrics, rel=1e-10, abs=1e-12)
    assert torch.equal(batch.old_log_probs, old)


# --- What the public functions check


def narrow(batch: DiffusionBatch) -> DiffusionBatch:
    """Returns the batch with rollout log-probs of one step in place of all."""
    assert batch.rollout_log_probs is not None
    return batch.replace(rollout_log_probs=batch.rollout_log_probs[:, :1])


WRONG_SHAPES: dict[str, Callable[[Tensor, Tensor, Tensor], object]] = {
    "weights_and_mask": lambda old, rollout, mask: compute_rollout_correction_and_rejection_mask(
        old, rollout[:, :1], mask, rollout_is="token"
    ),
    "metrics": lambda old, rollout, mask: compute_offpolicy_metrics(old, rollout[:, :1], mask),
    "metrics_of_one": lambda old, rollout, mask: compute_offpolicy_metrics(old, None, mask[:, :1]),
    "weights": lambda old, rollout, mask: compute_rollout_correction_weights(
        old - rollout, mask[:, :1], rollout_is="token"
    ),
    "mask": lambda old, rollout, mask: compute_rollout_rejection_mask(
        old - rollout, mask[:, :1], rollout_rs="token_k1", rollout_rs_threshold="0.5_2.0"
    ),
    "batch": lambda old, rollout, mask: apply_rollout_correction_to_batch(
        narrow(diffusion_batch(rollout, old_log_probs=old)), RolloutCorrectionConfig()
    ),
    "bypass": lambda old, rollout, mask: apply_bypass_mode(narrow(diffusion_batch(rollout))),
    "one_dimension": lambda old, *_: compute_rollout_correction_and_rejection_mask(
        old[:, 0], old[:, 0], old[:, 0]
    ),
}


@pytest.mark.parametrize("function", WRONG_SHAPES)
def test_one_column_is_not_broadcast_against_many(function: str) -> None:
    old, rollout = log_probs()
    with pytest.raises(ValueError, match=r"must all be \[B, T\]; got .*\(6"):
        WRONG_SHAPES[function](old, rollout, mask_of("full"))


def test_log_probs_are_no_integers_and_the_masks_of_a_batch_are_bool() -> None:
    numbers = torch.ones(6, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match="old_log_prob must hold floating-point numbers"):
        compute_offpolicy_metrics(numbers, numbers, mask_of("full"))
    old, rollout = log_probs()
    batch = diffusion_batch(rollout, old_log_probs=old, rejection_mask=mask_of("full").long())
    with pytest.raises(ValueError, match=r"rejection_mask must be bool; got torch\.int64"):
        apply_rollout_correction_to_batch(batch, RolloutCorrectionConfig())


def test_metrics_of_the_training_policy_alone_need_no_rollout() -> None:
    old, rollout = log_probs()
    mask = mask_of("right")
    alone = compute_offpolicy_metrics(old, None, mask)
    both = compute_offpolicy_metrics(old, rollout, mask)
    assert alone == {name: both[name] for name in ("training_ppl", "training_log_ppl")}
    log_ppl = -(old * mask).sum(1) / mask.sum(1)
    assert alone["training_log_ppl"] == pytest.approx(log_ppl.mean().item(), rel=1e-12)
    assert alone["training_ppl"] == pytest.approx(log_ppl.exp().mean().item(), rel=1e-12)
