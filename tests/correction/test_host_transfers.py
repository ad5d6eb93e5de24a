"""No call of the correction makes the host wait more than once; nothing inside the loss does."""

import pytest
import torch
from benchmark_correction import make_inputs
from support.builders import diffusion_batch, loss_config, token_batch
from support.costs import transfers

from flowgrpo_rc import compute_offpolicy_metrics, compute_rollout_correction_and_rejection_mask
from flowgrpo_rc.algorithms.policy_gradient.images import DiffusionObjective
from flowgrpo_rc.algorithms.policy_gradient.text import TokenObjective
from flowgrpo_rc.core.transition import GaussianSteps
from flowgrpo_rc.correction.config import RolloutCorrectionConfig
from flowgrpo_rc.losses.config import DiffusionLossConfig, LossConfig

INPUTS = make_inputs(6, 32)
SETTINGS = [
    {},
    {"rollout_is": "token", "rollout_is_mode": "mask", "rollout_token_veto_threshold": 1e-4},
    {
        "rollout_is": "sequence",
        "rollout_is_batch_normalize": True,
        "rollout_rs": "token_k1,seq_max_k3,seq_sum_k2",
    },
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_public_call_makes_one_transfer(settings: dict[str, object]) -> None:
    if "rollout_rs" in settings:
        settings = settings | {"rollout_rs_threshold": ["0.5_2.0", 0.1, 0.1]}
    assert (
        transfers(lambda: compute_rollout_correction_and_rejection_mask(*INPUTS, **settings)) == 1
    )
    assert transfers(lambda: compute_offpolicy_metrics(*INPUTS)) == 1


@pytest.mark.parametrize(
    "mode", [{"bypass_mode": True}, {"bypass_mode": True, "loss_type": "reinforce"}, {}]
)
def test_a_loss_makes_no_transfer(mode: dict[str, object]) -> None:
    now, rollout, mask = INPUTS
    correction = RolloutCorrectionConfig(
        rollout_is="token", rollout_rs="seq_mean_k1", rollout_rs_threshold=2.0, **mode
    )
    filled = {"old_log_probs": rollout, "advantages": torch.ones_like(rollout)}
    config = loss_config(correction)
    steps = diffusion_batch(rollout, **filled)
    tokens = token_batch(rollout, mask.bool(), **filled)
    assert transfers(lambda: DiffusionObjective(config).terms(now, steps)) == 0
    assert transfers(lambda: TokenObjective(config).terms(now, tokens)) == 0


@pytest.mark.parametrize("loss_mode", ["grpo_guard", "flow_dppo"])
def test_a_loss_with_means_makes_no_transfer(loss_mode: str) -> None:
    now, rollout, _ = INPUTS
    correction = RolloutCorrectionConfig(
        bypass_mode=True, rollout_rs="step_kl", rollout_rs_threshold=0.1
    )
    batch = diffusion_batch(rollout, old_log_probs=rollout, advantages=torch.ones_like(rollout))
    config = LossConfig(
        rollout_correction=correction, diffusion_loss=DiffusionLossConfig(loss_mode=loss_mode)
    )
    gaussian = GaussianSteps(torch.ones_like(now), -torch.ones_like(now), (now - rollout) ** 2)
    assert transfers(lambda: DiffusionObjective(config).terms(now, batch, gaussian)) == 0
