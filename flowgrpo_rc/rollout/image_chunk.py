"""Samples of pictures as an engine returns them."""

from dataclasses import dataclass

import torch

from flowgrpo_rc.batch import Conditioning, DiffusionBatch, SamplerSpec
from flowgrpo_rc.models.base import FlowModel
from flowgrpo_rc.policies.flow import Trajectory
from flowgrpo_rc.rollout.engine import ImageRequest, RolloutChunk


@dataclass(frozen=True, kw_only=True)
class SampledImages:
    """Images that an engine has sampled.

    trajectory: their latents and log-probs.
    conditioning, negative: those of all prompts of the request.
    spec: the settings that they were sampled with.
    version: the step whose LoRA sampled them.
    blocks: evaluations of blocks that a cache has saved, and all with them.
    """

    trajectory: Trajectory
    conditioning: Conditioning
    negative: Conditioning | None
    spec: SamplerSpec
    version: int
    blocks: tuple[int, int] = (0, 0)


def image_chunk(
    model: FlowModel, request: ImageRequest, rows: range, sampled: SampledImages
) -> RolloutChunk:
    """Makes a chunk of the `rows` of a request, decoded unless it says otherwise."""
    trajectory, spec = sampled.trajectory, sampled.spec
    device = model.device
    prompt_index = torch.tensor([row // request.samples_per_prompt for row in rows], device=device)
    window = request.window[rows.start : rows.stop].to(device)
    batch = DiffusionBatch(
        spec=spec,
        all_latents=trajectory.window_latents,
        all_timesteps=trajectory.schedule.timesteps[window],
        step_indices=window,
        sigmas=trajectory.schedule.sigmas,
        rollout_log_probs=trajectory.log_probs,
        prev_sample_mean=trajectory.means,
        conditioning=sampled.conditioning,
        negative=sampled.negative,
        prompt_index=prompt_index,
        group=torch.tensor(request.prompts.slots, device=device)[prompt_index],
        seed=torch.tensor(request.seeds[rows.start : rows.stop], device=device),
        policy_version=torch.full_like(prompt_index, sampled.version),
    )
    return RolloutChunk(
        batch=batch,
        samples=model.decode(trajectory.final, spec) if request.decode else None,
        prompts=[request.prompt_of(row) for row in rows],
        latents=trajectory.final,
        blocks=sampled.blocks,
    )
