"""Which denoising steps are stochastic, recorded and trained: the SDE window."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flowgrpo_rc.core.random import generator

SHARING = ("batch", "group", "sample")


def window_bounds(
    num_steps: int, size: int | None, bounds: Sequence[int] | None, sde_type: str
) -> tuple[int, int, int]:
    """(size, first, last): the window's length and the range [first, last) that it is drawn from.

    Without a size the window is the whole range. Without a range it is every step except the last
    one, whose sigma_next is 0 (no noise at all in `cps`) and which the reference recipe does not
    train.

    Raises ValueError where the window does not fit the schedule.
    """
    if bounds is not None and len(bounds) != 2:
        raise ValueError(
            f"rollout.algo.sde_window_range={list(bounds)}: give two step indices, [first, last]"
        )
    first, last = (0, num_steps - 1) if bounds is None else (int(bounds[0]), int(bounds[1]))
    if not 0 <= first < last <= num_steps:
        raise ValueError(
            f"rollout.algo.sde_window_range=[{first}, {last}] does not lie in the schedule of "
            f"{num_steps} steps: "
            f"give 0 <= first < last <= {num_steps} (rollout.pipeline.num_inference_steps)"
        )
    if sde_type == "cps" and last == num_steps:
        raise ValueError(
            f"rollout.algo.sde_window_range=[{first}, {last}] includes the last step, which has "
            "no noise and so no "
            f"density with sde_type=cps: end the range at {num_steps - 1}"
        )
    length = last - first if size is None else size
    if not 1 <= length <= last - first:
        raise ValueError(
            f"rollout.algo.sde_window_size={size} does not fit "
            f"rollout.algo.sde_window_range=[{first}, {last}]: "
            f"give 1 to {last - first}"
        )
    return length, first, last


def draw_windows(
    slots: Sequence[int],
    samples_per_prompt: int,
    *,
    size: int,
    first: int,
    last: int,
    sharing: str,
    seed: int,
    step: int,
) -> Tensor:
    """Step indices [P * samples_per_prompt, size] int64 of each sample's window.

    The start is uniform over the positions that fit. `sharing` says who has the same window: the
    whole batch, the samples of a prompt (`group`), or nobody (`sample`; one peer saw training
    collapse with it).
    """
    samples = [(slot, index) for slot in slots for index in range(samples_per_prompt)]
    shared = {"batch": 0, "group": 1, "sample": 2}[sharing]
    keys = [sample[:shared] for sample in samples]
    starts = [
        first
        + int(
            torch.randint(
                last - first - size + 1, (), generator=generator(seed, step, *key, "window")
            )
        )
        for key in keys
    ]
    return torch.tensor(starts, dtype=torch.int64).unsqueeze(1) + torch.arange(size).unsqueeze(0)
