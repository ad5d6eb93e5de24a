"""Samples of pictures as an engine returns them."""

import torch

from flowgrpo_rc.batch import Conditioning, DiffusionBatch, SamplerSpec
from flowgrpo_rc.models.base import FlowModel
from flowgrpo_rc.policies.flow import Trajectory
from flowgrpo_rc.rollout.engine import ImageRequest, RolloutChunk


def image_chunk(
    model: FlowModel,
    request: ImageRequest,
    rows: range,
    trajectory: Trajectory,
    conditioning: Conditioning,
    negative: Conditioning | None,
    *,
    spec: SamplerSpec,
    version: int,
    blocks: tuple[int, int] = (0, 0),
) -> RolloutChunk:
    """Makes a chunk of sampled `rows`; conditionings are those of all prompts of the request."""
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
        conditioning=conditioning,
        negative=negative,
        prompt_index=prompt_index,
        group=torch.tensor(request.prompts.slots, device=device)[prompt_index],
        seed=torch.tensor(request.seeds[rows.start : rows.stop], device=device),
        policy_version=torch.full_like(prompt_index, version),
    )
    return RolloutChunk(
        batch=batch,
        samples=model.decode(trajectory.final, spec) if request.decode else None,
        prompts=[request.prompt_of(row) for row in rows],
        latents=trajectory.final,
        blocks=blocks,
    )
