"""Why a sample was rejected: which value left which bounds."""

import math
from typing import Any

import pytest
import torch
from support.builders import diffusion_batch
from support.decisions import normal

from flowgrpo_rc.correction.api import apply_rollout_correction_to_batch
from flowgrpo_rc.correction.config import RolloutCorrectionConfig
from flowgrpo_rc.correction.reasons import Reason, reasons

RATIO = math.exp(0.02)
MEAN = math.exp(0.005)
LOWEST = math.exp(-0.005)


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        (("token_k1", "0.99_1.01"), Reason("token_k1", RATIO, 0.99, 1.01)),
        (("seq_mean_k1", "0.99_1.001"), Reason("seq_mean_k1", MEAN, 0.99, 1.001)),
        (("seq_max_k2", 1e-4), Reason("seq_max_k2", 2e-4, None, 1e-4)),
        (("token_k1", "auto:4"), Reason("token_k1", RATIO)),
        (
            {"rollout_is": "token", "rollout_is_mode": "mask", "rollout_is_threshold": 1.01},
            Reason("rollout_is", RATIO, 1 / 1.01, 1.01),
        ),
        ({"rollout_token_veto_threshold": 0.999}, Reason("veto", LOWEST, 0.999)),
    ],
    ids=["token", "sequence", "k2", "auto", "weights", "veto"],
)
def test_a_rejected_row_says_which_value_left_which_bounds(settings: Any, wanted: Reason) -> None:
    if isinstance(settings, tuple):
        settings = dict(zip(("rollout_rs", "rollout_rs_threshold"), settings, strict=True))
    training = torch.tensor([0.0, 0.02, -0.005], dtype=torch.float64)
    rules = RolloutCorrectionConfig(**settings).rules()
    (actual,) = reasons(training, torch.zeros(3), torch.ones(3, dtype=torch.bool), rules)
    assert actual.criterion == wanted.criterion
    for value, expected in zip(actual[1:], wanted[1:], strict=True):
        assert value == (None if expected is None else pytest.approx(expected, rel=1e-9))


def test_rows_that_are_kept_have_no_reason_and_broken_ones_say_so() -> None:
    config = RolloutCorrectionConfig(rollout_rs="token_k1", rollout_rs_threshold="0.5_2.0")
    mask = torch.tensor([True, True, False])
    kept = torch.tensor([0.1, -0.1, 9.0])
    assert reasons(kept, torch.zeros(3), mask, config.rules()) == []
    (broken,) = reasons(torch.tensor([0.1, math.inf, 0.0]), torch.zeros(3), mask, config.rules())
    assert (broken.criterion, broken.value) == ("not finite", math.inf)


@pytest.mark.parametrize(
    "settings",
    [
        {"rollout_rs": "token_k1,seq_mean_k2", "rollout_rs_threshold": ["0.9_1.2", 0.004]},
        {
            "rollout_rs": "seq_sum_k1",
            "rollout_rs_threshold": "0.9_1.1",
            "rollout_token_veto_threshold": 0.85,
        },
        {"rollout_is": "geometric", "rollout_is_mode": "mask", "rollout_is_threshold": 1.05},
    ],
)
def test_exactly_the_rejected_rows_have_reasons(
    settings: dict[str, Any],
) -> None:
    config = RolloutCorrectionConfig(**settings)
    training = normal(40, 3, scale=0.08)
    training[11, 1] = math.nan
    batch = diffusion_batch(torch.zeros(40, 3), old_log_probs=training)
    corrected, _ = apply_rollout_correction_to_batch(batch, config)
    rejected = (~corrected.rejection_mask).any(1).tolist()
    assert 5 < sum(rejected) < 35
    actual = [
        bool(reasons(row, torch.zeros(3), torch.ones(3, dtype=torch.bool), config.rules()))
        for row in training
    ]
    assert actual == rejected
