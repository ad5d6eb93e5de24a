"""A user's function in place of the built-in correction."""

import math
import sys
from pathlib import Path

import pytest
import torch
from support.builders import diffusion_batch, expected, log_probs, mask_of
from support.oracles import Rule

from flowgrpo_rc import RolloutCorrectionConfig, apply_rollout_correction_to_batch
from flowgrpo_rc.config.compose import compose_all
from flowgrpo_rc.core.reduce import identity
from flowgrpo_rc.correction.correct import Corrector

SECTION = "algorithm.rollout_correction"
MODULE = """
import torch

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


@pytest.mark.parametrize("all_reduce", [identity, None])
@pytest.mark.parametrize("function", ["drop_odd", "only_a_mask"])
def test_a_custom_correction_takes_the_place_of_weights_and_mask(all_reduce, function):
    training, rollout = log_probs()
    training[2, 1] = math.nan
    mask = mask_of("right")
    config = RolloutCorrectionConfig(custom_correction=f"support.builders:{function}")
    config.validate()
    actual = Corrector(config)(training, rollout, mask, all_reduce=all_reduce)
    valid = mask & torch.isfinite(training)
    kept = valid & (torch.arange(6) % 2 == 0).unsqueeze(1)
    assert torch.equal(actual.mask, kept)
    values = actual.metrics.compute()
    expect = expected(training, rollout, mask, Rule()).metrics
    assert values.keys() == expect.keys()
    assert values["rollout_is_veto_fraction"] == 0
    assert values["kl"] == pytest.approx(expect["kl"])
    share = 1 - kept.sum().item() / mask.sum().item()
    assert values["rollout_is_masked_fraction"] == pytest.approx(share)
    if function == "drop_odd":
        assert torch.equal(actual.weights, 3.0 * valid)
        assert values["rollout_is_mean"] == values["rollout_is_max"] == 3


def test_the_weights_of_a_custom_correction_are_normalised_where_the_settings_say_so():
    """This is decoupled mode; in bypass mode the loss divides by the mean."""
    config = RolloutCorrectionConfig(
        rollout_is="token",
        rollout_is_batch_normalize=True,
        custom_correction="support.builders:drop_odd",
    )
    actual = Corrector(config)(*log_probs(), mask_of("right"))
    assert torch.equal(actual.weights, mask_of("right").double())
    assert actual.metrics.compute()["rollout_is_batch_norm_factor"] == 3
