"""The SDE window: which denoising steps are stochastic, recorded and trained.

Legend: P prompts, n samples of each prompt, T steps of a window.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from flowgrpo_rc.core.random import generator

SHARING = ("batch", "group", "sample")
TAILS = ("euler", "ab2")


def window_bounds(
    num_steps: int, size: int | None, bounds: Sequence[int] | None, sde_type: str
) -> tuple[int, int, int]:
    """Checks the settings of the window and fills in what they leave open: (size, first, last).

    The last step of the schedule ends at sigma 0. There `cps` has no noise, and so no density, and
    the recipe of FlowGRPO does not train it. Without a range it is therefore left out.

    Args:
      num_steps: number of denoising steps of the schedule.
      size: number of steps of the window, T; None for the whole range.
      bounds: [first, last), the step indices that a window may hold; None for all but the last.
      sde_type: a kind of `core.transition`.

    Raises:
      ValueError: the window does not fit the schedule, or holds a step without a density.
    """
    span = [0, num_steps - 1] if bounds is None else list(bounds)
    if len(span) != 2 or not 0 <= span[0] < span[1] <= num_steps:
        steps = f", 0 <= first < last <= {num_steps} (rollout.pipeline.num_inference_steps)"
        raise ValueError(
            f"rollout.algo.sde_window_range={span}: give two step indices, [first, last]"
            + (steps if len(span) == 2 else "")
        )
    first, last = map(int, span)
    if sde_type == "cps" and last == num_steps:
        raise ValueError(
            f"rollout.algo.sde_window_range=[{first}, {last}] includes the last step, which has no "
            f"noise and so no density with sde_type=cps: end the range at {num_steps - 1}"
        )
    length = last - first if size is None else size
    if not 1 <= length <= last - first:
        raise ValueError(
            f"rollout.algo.sde_window_size={size} does not fit "
            f"rollout.algo.sde_window_range=[{first}, {last}] in the schedule of {num_steps} steps "
            f"(rollout.pipeline.num_inference_steps): give 1 to {last - first}"
        )
    return length, first, last


def sliding_start(step: int, *, size: int, first: int, last: int, interval: int) -> int:
    """Computes where the windows of a training step start if they slide along the schedule.

    They stay for `interval` training steps at first, then at first + 1, and so on as long as a
    window fits, and then begin at first again.

    Args:
      step: training step, from 1; a calibration, which has step 0, counts as the first.
      size: number of steps of a window, T.
      first: the first step that a window may hold.
      last: one past the last step that a window may hold.
      interval: training steps at one place.

    Returns:
      The index of the first step of all windows.

    See "MixGRPO", https://arxiv.org/abs/2507.21802, section 3.2, whose window stops at the end; its
    published scripts start anew, as here.
    """
    starts = range(first, last - size + 1)
    return starts[max(step - 1, 0) // interval % len(starts)]


def kept_steps(num_steps: int, tail_start: int | None, tail_steps: int | None) -> list[int]:
    """Chooses the steps of a schedule that are evaluated when the tail has fewer of them.

    The last step is left out first: most schedules end next to sigma 0, where it does nothing. The
    others keep about equal distances.

    Args:
      num_steps: denoising steps of the schedule, S.
      tail_start: the first step of the tail; None for no tail.
      tail_steps: the most evaluations in the tail; None for all.
    """
    if tail_start is None or tail_steps is None or tail_start + tail_steps >= num_steps:
        return list(range(num_steps))
    # Spread over the tail without its last step, which changes nothing next to sigma 0.
    length = num_steps - 1 - tail_start
    tail = [tail_start + round(step * length / tail_steps) for step in range(tail_steps)]
    return [*range(tail_start), *tail]


def draw_windows(
    slots: Sequence[int],
    samples_per_prompt: int,
    *,
    window: tuple[int, int, int],
    sharing: str,
    seed: int,
    step: int,
) -> Tensor:
    """Draws the window of each sample. Its start is uniform over the positions that fit.

    Args:
      slots: [P]; position of each prompt in the global batch.
      samples_per_prompt: n.
      window: number of steps of a window, T, and the steps [first, last) in which it lies.
      sharing: who has the same window: `batch` (all samples), `group` (those of a prompt) or
        `sample` (nobody; one other project saw its training collapse with it).
      seed: seed of the run.
      step: training step.

    Returns:
      Step indices, int64, [P * n, T], by prompt and then by sample.

    See "MixGRPO", https://arxiv.org/abs/2507.21802, for windows at random places; `sliding_start`
    has those that slide.
    """
    size, first, last = window
    samples = [(slot, index) for slot in slots for index in range(samples_per_prompt)]
    # Samples that share a window share the numbers that its start is drawn from.
    key_length = {"batch": 0, "group": 1, "sample": 2}[sharing]
    num_positions = last - first - size + 1
    # A generator of its own for each sample: no draw depends on who else is in the batch.
    starts = []
    for sample in samples:
        source = generator(seed, step, *sample[:key_length], "window")
        starts.append(first + int(torch.randint(num_positions, (), generator=source)))
    return torch.tensor(starts, dtype=torch.int64).unsqueeze(1) + torch.arange(size).unsqueeze(0)


def draw_times(seeds: Sequence[int], num_steps: int, count: int | None) -> Tensor:
    """Draws the noise levels at which clean samples are trained on.

    Those of a sample are different steps of the schedule, in a random order.

    Args:
      seeds: one for each sample, [B].
      num_steps: denoising steps of the schedule, S.
      count: T, how many for each sample, at most S; None for all.

    Returns:
      Indices of the steps, int64, [B, T].
    """
    # A permutation, then a cut: T levels are a prefix of all, whatever T is.
    orders = [torch.randperm(num_steps, generator=generator(seed, "times")) for seed in seeds]
    return torch.stack(orders)[:, :count]


def shift_sigmas(sigmas: Tensor, shift: float) -> Tensor:
    """Computes noise levels of any shape under a shift: shift sigma / (1 + (shift - 1) sigma)."""
    return shift * sigmas / (1 + (shift - 1) * sigmas)
