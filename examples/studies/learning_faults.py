"""A rollout engine with a planted fault."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from flowgrpo_rc.rollout.diffusers_engine import DiffusersEngine
from flowgrpo_rc.rollout.engine import ImageRequest, RolloutChunk

ONE_IN = 4


class LateLatents(DiffusersEngine):
    """An engine that records the latents of one sample in four one step late.

    It is the fault of a window that is off by one for some samples. The last latent then stands
    twice. Log-probs, images and rewards are right.
    """

    def generate(self, request: ImageRequest) -> Iterator[RolloutChunk]:
        """Samples as the stock engine does, and then shifts the latents of some samples."""
        for chunk in super().generate(request):
            latents = chunk.batch.all_latents.clone()
            late = chunk.batch.seed % ONE_IN == 0
            latents[late] = torch.cat([latents[late, 1:], latents[late, -1:]], dim=1)
            yield replace(chunk, batch=chunk.batch.replace(all_latents=latents))
