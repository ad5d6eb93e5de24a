"""A user's function in place of the built-in correction."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch
from support.builders import (
    diffusion_batch,
    expected,
    log_probs,
    loss_config,
    mask_of,
)
from support.oracles import Rule

from flowgrpo_rc import (
    RolloutCorrectionConfig,
    apply_rollout_correction_to_batch,
    diffusion_loss,
)
from flowgrpo_rc.config.compose import compose_all
from flowgrpo_rc.config.translate_correction import rollout_correction
from flowgrpo_rc.correction.correct import Corrector

SECTION = "algorithm.rollout_correction"
MODULE = """
import torch

def halve(training, rollout, mask, config):
    kept = mask.clone()
    kept[0] = False
    return 0.5 * (training - rollout).exp(), kept

def one_column(training, rollout, mask, config):
    return None, mask[:, :1]

def long_weights(training, rollout, mask, config):
    return torch.ones(len(mask), 9), mask

a_number = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_own_correction.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_own_correction", raising=False)
    return "my_own_correction"


@pytest.mark.parametrize(
    "older", [False, True], ids=["custom_correction", "custom_tis_function_path"]
)
def test_a_function_in_place_of_the_built_in_correction(module: str, older: bool) -> None:
    written = (
        {"custom_tis_function_path": f"{module}.halve"}
        if older
        else {"custom_correction": f"{module}:halve"}
    )
    config, _ = rollout_correction([written])
    training, rollout = log_probs()
    batch, metrics = apply_rollout_correction_to_batch(
        diffusion_batch(rollout, old_log_probs=training), config
    )
    weights = 0.5 * (training - rollout).exp()
    torch.testing.assert_close(batch.rollout_is_weights, weights)
    kept = torch.ones_like(training, dtype=torch.bool)
    kept[0] = False
    assert batch.rejection_mask.equal(kept)
    found = metrics.compute()
    assert found["rollout_is_mean"] == pytest.approx(weights.mean().item())
    assert found["rollout_is_max"] == pytest.approx(weights.max().item())
    assert found["rollout_rs_masked_fraction"] == found["rejected_ratio"] == pytest.approx(1 / 6)
    assert found["kl"] == pytest.approx((rollout - training).mean().item())


def test_the_loss_uses_the_weights_and_mask_of_the_function(module: str) -> None:
    training, rollout = log_probs()
    config = RolloutCorrectionConfig(
        bypass_mode=True, loss_type="reinforce", custom_correction=f"{module}:halve"
    )
    fields = {"old_log_probs": rollout, "advantages": torch.ones_like(rollout)}
    current = training.clone().requires_grad_()
    loss, _ = diffusion_loss(loss_config(config), current, diffusion_batch(rollout, **fields))
    loss.backward()
    expect = -0.5 * (training - rollout).exp() / training.numel()
    expect[0] = 0
    torch.testing.assert_close(current.grad, expect)


@pytest.mark.parametrize("name", ["one_column", "long_weights"])
def test_the_shapes_that_the_function_returns_are_checked(module: str, name: str) -> None:
    training, rollout = log_probs()
    batch = diffusion_batch(rollout, old_log_probs=training)
    with pytest.raises(ValueError, match=rf"custom_correction={module}:{name}.*\(6, 4\)"):
        apply_rollout_correction_to_batch(
            batch, RolloutCorrectionConfig(custom_correction=f"{module}:{name}")
        )


@pytest.mark.parametrize(
    "function", ["no_such_module:f", "{}:no_such_function", "{}:a_number", "{}", ":halve", "{}:"]
)
def test_a_function_that_is_not_there(module: str, function: str) -> None:
    config = RolloutCorrectionConfig(custom_correction=function.format(module))
    with pytest.raises(ValueError, match=f"{SECTION}.custom_correction="):
        config.validate()
    with pytest.raises(ValueError, match=f"{SECTION}.custom_correction="):
        compose_all([f"{SECTION}.custom_correction='{function.format(module)}'"])


@pytest.mark.parametrize("normalise", [True, False])
def test_a_custom_correction_takes_the_place_of_weights_and_mask(normalise):
    training, rollout = log_probs()
    training[2, 1] = math.nan
    mask = mask_of("right")
    config = RolloutCorrectionConfig(custom_correction="support.builders:drop_odd")
    config.validate()
    found = Corrector(config)(training, rollout, mask, normalise=normalise)
    valid = mask & torch.isfinite(training)
    even = (torch.arange(6) % 2 == 0).unsqueeze(1)
    assert torch.equal(found.mask, valid & even)
    assert torch.equal(found.weights, 3.0 * valid)
    values = found.metrics.compute()
    assert values["rollout_is_mean"] == values["rollout_is_max"] == 3
    assert values["kl"] == pytest.approx(expected(training, rollout, mask, Rule()).metrics["kl"])
    assert values["rollout_is_masked_fraction"] == pytest.approx(
        1 - (valid & even).sum().item() / mask.sum().item()
    )


@pytest.mark.parametrize("function", ["drop_odd", "only_a_mask"])
def test_a_custom_correction_has_the_metrics_that_documents_read(function):
    training, rollout = log_probs()
    config = RolloutCorrectionConfig(custom_correction=f"support.builders:{function}")
    values = Corrector(config)(training, rollout, mask_of("full")).metrics.compute()
    assert values.keys() == expected(training, rollout, mask_of("full"), Rule()).metrics.keys()
    assert values["rollout_is_veto_fraction"] == 0


def test_the_weights_of_a_custom_correction_are_normalised_where_the_settings_say_so():
    """This is decoupled mode; in bypass mode the loss divides by the mean."""
    training, rollout = log_probs()
    keys = {
        "rollout_is": "token",
        "rollout_is_batch_normalize": True,
        "custom_correction": "support.builders:drop_odd",
    }
    found = Corrector(RolloutCorrectionConfig(**keys))(training, rollout, mask_of("right"))
    assert torch.equal(found.weights, mask_of("right").double())
    assert found.metrics.compute()["rollout_is_batch_norm_factor"] == 3


@pytest.mark.parametrize("function", ["a_wrong_shape", "wrong_weights"])
def test_a_custom_correction_of_another_shape_is_refused(function):
    training, rollout = log_probs()
    config = RolloutCorrectionConfig(custom_correction=f"support.builders:{function}")
    with pytest.raises(ValueError, match=rf"support.builders:{function}.*\(6, 4\)"):
        Corrector(config)(training, rollout, mask_of("full"))
