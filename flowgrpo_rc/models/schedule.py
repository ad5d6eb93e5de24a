"""The noise levels that a denoising walks through."""

from typing import NamedTuple

import torch
from torch import Tensor

from flowgrpo_rc.batch import DiffusionBatch


class Schedule(NamedTuple):
    """Noise levels of a denoising, fp32 [S+1] down to 0, and timesteps of the transformer, [S]."""

    sigmas: Tensor
    timesteps: Tensor

    def check(self, batch: DiffusionBatch) -> None:
        """Raises ValueError unless a rollout walked this schedule; no log-prob would show it."""
        for name, walked, wanted in (
            ("sigmas", batch.sigmas, self.sigmas),
            ("all_timesteps", batch.all_timesteps, self.timesteps[batch.step_indices]),
        ):
            if walked.shape != wanted.shape or not torch.allclose(
                walked, wanted.to(walked), rtol=1e-5, atol=1e-6
            ):
                raise ValueError(
                    f"the rollout walked another schedule than the model's: {name} are "
                    f"{_first(walked)}, and should be {_first(wanted)}; check the scheduler "
                    "(shift, dtype of the timesteps) of the engine"
                )


def _first(values: Tensor) -> str:
    numbers = values.flatten()[:4].tolist()
    return ", ".join(f"{value:g}" for value in numbers) + ", ..."
