"""A rollout engine with a planted fault."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from flowgrpo_rc.rollout.diffusers_engine import DiffusersEngine
from flowgrpo_rc.rollout.engine import ImageRequest, RolloutChunk

ONE_IN = 4


class LateLatents(DiffusersEngine):
    """One sample in four comes back with its latents recorded one step late; its log-probs, image
    and reward are right.

    A per-sample window that is off by one. The last latent then stands twice.
    """

    def generate(self, request: ImageRequest) -> Iterator[RolloutChunk]:
        for chunk in super().generate(request):
            latents = chunk.batch.all_latents.clone()
            late = chunk.batch.seed % ONE_IN == 0
            latents[late] = torch.cat([latents[late, 1:], latents[late, -1:]], dim=1)
            yield replace(chunk, batch=chunk.batch.replace(all_latents=latents))
