"""Flow models whose latents are tokens: patches of 2 x 2 latents, row by row.

Legend: B samples, H and W height and width of a picture in pixels.
"""

from __future__ import annotations

from torch import Tensor

from flowgrpo_rc.batch import SamplerSpec
from flowgrpo_rc.models.base import FlowModel, Schedule
from flowgrpo_rc.models.layout import check_size, linear_schedule, unpack


class PackedModel(FlowModel):
    """A flow model with latents [B, H/16 * W/16, 64] and evenly spaced sigmas."""

    def check(self, spec: SamplerSpec, key: str) -> None:
        """Refuses sizes that do not fill whole patches."""
        check_size(spec, multiple=2 * self.pipeline.vae_scale_factor)

    def latent_shape(self, spec: SamplerSpec) -> tuple[int, ...]:
        """Returns one token for each patch of 2 x 2 latents, with all their channels."""
        rows, columns = self._patches(spec)
        return rows * columns, self.transformer.config.in_channels

    def schedule(self, spec: SamplerSpec) -> Schedule:
        """Returns evenly spaced sigmas, shifted for the number of tokens."""
        num_tokens, _ = self.latent_shape(spec)
        return linear_schedule(self.scheduler, spec.num_inference_steps, num_tokens, self.device)

    def _patches(self, spec: SamplerSpec) -> tuple[int, int]:
        """Returns rows and columns of the image's tokens."""
        side = 2 * self.pipeline.vae_scale_factor
        return spec.height // side, spec.width // side

    def _unpacked(self, latents: Tensor, spec: SamplerSpec) -> Tensor:
        """Returns tokens as a picture of latents, [B, 16, H/8, W/8]."""
        return unpack(latents, *self._patches(spec))
