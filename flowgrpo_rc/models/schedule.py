"""The noise levels that a denoising walks through, and pictures out of the VAE as bytes."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from flowgrpo_rc.batch import DiffusionBatch


class Schedule(NamedTuple):
    """Noise levels of a denoising, fp32 [S+1] down to 0, and timesteps of the transformer, [S]."""

    sigmas: Tensor
    timesteps: Tensor

    def check(self, batch: DiffusionBatch) -> None:
        """Raises ValueError unless a rollout walked this schedule; no log-prob would show it."""
        for name, found, wanted in (
            ("sigmas", batch.sigmas, self.sigmas),
            ("all_timesteps", batch.all_timesteps, self.timesteps[batch.step_indices]),
        ):
            if found.shape != wanted.shape or not torch.allclose(
                found, wanted.to(found), rtol=1e-5, atol=1e-6
            ):
                raise ValueError(
                    f"the rollout walked another schedule than the model's: {name} are "
                    f"{_first(found)}, and should be {_first(wanted)}; check the scheduler (shift, "
                    "dtype of the timesteps) of the engine"
                )


def _first(values: Tensor) -> str:
    numbers = values.flatten()[:4].tolist()
    return ", ".join(f"{value:g}" for value in numbers) + ", ..."


def to_uint8(pictures: Tensor) -> np.ndarray:
    """Rounds values in [0, 1], [..., C, H, W], to 0 to 255 on their device, channels last."""
    rounded = (pictures.float() * 255).round().to(torch.uint8)
    return rounded.movedim(-3, -1).cpu().numpy()
