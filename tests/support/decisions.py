"""Decisions of the correction with known differences."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flowgrpo_rc.monitoring.decisions import Decision


def normal(*shape: int, scale: float = 1e-4, seed: int = 0) -> Tensor:
    return scale * torch.randn(
        shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def observation(difference: Tensor, kept: Tensor | None = None, **fields: Any) -> Decision:
    rows = len(difference)
    given = {
        "seed": torch.arange(rows),
        "training_log_probs": difference,
        "rollout_log_probs": torch.zeros_like(difference),
        "step_mask": torch.ones_like(difference, dtype=torch.bool),
        "keep_mask": torch.ones_like(difference, dtype=torch.bool) if kept is None else kept,
        "cells": torch.arange(difference.shape[1]).expand(rows, -1),
        "step_kl": None,
        "num_elements": 10,
    }
    return Decision(**given | fields)
