"""Rejected rows do not shrink the gradient of the others where the kept mean is asked for."""

from __future__ import annotations

import pytest
import torch
from support.builders import diffusion_batch, gradient_of, loss_config, token_batch
from torch import Tensor

from flowgrpo_rc import diffusion_loss, token_loss
from flowgrpo_rc.correction.api import apply_rollout_correction_to_batch
from flowgrpo_rc.correction.config import RolloutCorrectionConfig

GOOD = 4
STEPS = 3
FAR = 5.0  # a log-ratio outside the band, and one whose gradient would be large


def drawn() -> tuple[Tensor, Tensor, Tensor]:
    """Draws rollout and current log-probs (within the clip of 0.1) and advantages of the kept
    rows.
    """
    source = torch.Generator().manual_seed(0)
    rollout, noise, advantages = torch.randn(3, GOOD, STEPS, generator=source, dtype=torch.float64)
    return rollout, rollout + 0.03 * noise, advantages


def with_rejected(count: int, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the same rows, and `count` more that lie far outside the band."""
    source = torch.Generator().manual_seed(seed)
    rollout, advantages = torch.randn(2, count, STEPS, generator=source, dtype=torch.float64)
    return tuple(
        torch.cat(pair)
        for pair in zip(drawn(), (rollout, rollout + FAR, 10 * advantages), strict=True)
    )


def config(mode: dict[str, object], normalize: str) -> RolloutCorrectionConfig:
    return RolloutCorrectionConfig(
        rollout_rs="seq_mean_k1", rollout_rs_threshold="0.5_2.0", normalize=normalize, **mode
    )


MODES = {
    "decoupled": {},
    "decoupled_is": {"rollout_is": "token"},
    "normalised": {"rollout_is": "sequence", "rollout_is_batch_normalize": True},
    "bypass": {"bypass_mode": True},
    "reinforce": {"bypass_mode": True, "loss_type": "reinforce", "rollout_is": "token"},
}


def gradient(mode: str, normalize: str, count: int, *, text: bool) -> Tensor:
    """Returns the gradient of the loss at the kept rows.

    In decoupled mode the rejected rows are off before the update.
    """
    correction = config(MODES[mode], normalize)
    rollout, now, advantages = with_rejected(count)
    old = rollout if correction.bypass_mode else now
    mask = torch.ones_like(rollout, dtype=torch.bool)
    fields = {"old_log_probs": old, "advantages": advantages}
    batch = token_batch(rollout, mask, **fields) if text else diffusion_batch(rollout, **fields)
    if not correction.bypass_mode:
        batch, _ = apply_rollout_correction_to_batch(batch, correction)
    loss = token_loss if text else diffusion_loss
    settings = loss_config(correction, adv_clip=100.0)
    found = gradient_of(lambda x: loss(settings, x, batch)[0], now)[1]
    assert torch.count_nonzero(found[GOOD:]) == 0
    return found[:GOOD]


@pytest.mark.parametrize("text", [False, True], ids=["images", "text"])
@pytest.mark.parametrize("mode", MODES)
def test_the_kept_mean_does_not_depend_on_the_number_of_rejected_rows(
    mode: str, text: bool
) -> None:
    """The documents' mean over all rows does: its gradient shrinks as kept / all."""
    alone = gradient(mode, "kept", 0, text=text)
    assert alone.abs().max() > 0
    for count in (1, 4, 40):
        found = gradient(mode, "kept", count, text=text)
        torch.testing.assert_close(found, alone, rtol=1e-12, atol=1e-15)
        if mode != "normalised":
            found = gradient(mode, "all", count, text=text)
            expect = alone * GOOD / (GOOD + count)
            torch.testing.assert_close(found, expect, rtol=1e-12, atol=1e-15)
