"""A flow model on the forward process: its velocities at finished samples with noise added.

Legend: B samples, T noise levels of each; b samples and t noise levels of one forward, which sees
them as b t rows.
"""

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from flowgrpo_rc.batch import DiffusionBatch
from flowgrpo_rc.core.random import derive_seed, normal
from flowgrpo_rc.core.schedule import draw_times
from flowgrpo_rc.policies.flow import FlowPolicy


class Matching(NamedTuple):
    """Velocities at noised samples, [b, t, ...]; differentiable in the weights."""

    velocity: Tensor  # what the model predicts
    target: Tensor  # what it should be, noise minus sample


class VelocityGraph:
    """The transformer of a flow policy on finished samples.

    The noise of a sample at a noise level follows from the sample's seed and the level alone.
    """

    def __init__(self, flow: FlowPolicy) -> None:
        self._flow = flow
        self.network = flow.network

    def noised(self, batch: DiffusionBatch, times: int | None) -> DiffusionBatch:
        """Draws the noise levels at which finished samples, `all_latents` [B, 1, ...], are trained
        on.

        Returns the batch with a noise level in place of each step, [B, T]: `times` of them, or all
        of the schedule for None. `all_latents` repeats the samples, and takes no memory for it.
        """
        schedule = self._flow.model.walked_schedule(batch.spec)
        steps = draw_times(batch.seed.tolist(), len(schedule.timesteps), times).to(batch.seed)
        clean = batch.all_latents
        return batch.replace(
            all_latents=clean.expand(-1, steps.shape[1] + 1, *clean.shape[2:]),
            all_timesteps=schedule.timesteps[steps],
            step_indices=steps,
            rollout_log_probs=None,
        )

    def pieces(self, micro: DiffusionBatch) -> Iterator[DiffusionBatch]:
        """Cuts a micro-batch into the noise levels of each forward."""
        return self._flow.pieces(micro)

    def evaluate(self, piece: DiffusionBatch) -> Matching:
        """Evaluates the transformer at the noised samples of a piece, [b, t].

            x_t = (1 - sigma) x + sigma e

        See "Flow Matching for Generative Modeling", https://arxiv.org/abs/2210.02747.
        """
        # All entries are the same sample; `steps` cuts one more of them than there are levels.
        clean = piece.all_latents[:, 1:].flatten(0, 1)
        # Of the sample and the level alone: neither micro-batches nor processes move the noise.
        levels = zip(piece.seed.tolist(), piece.step_indices.tolist(), strict=True)
        seeds = [derive_seed(seed, step) for seed, steps in levels for step in steps]
        noise = normal(clean.shape[1:], seeds, "forward").to(clean)
        sigma = piece.sigmas[piece.step_indices].flatten()
        sigma = sigma.reshape(-1, *[1] * (clean.ndim - 1))
        velocity = self._flow.velocity(piece, (1 - sigma) * clean + sigma * noise)
        rows = len(piece), piece.num_steps
        return Matching(velocity.unflatten(0, rows), (noise - clean).unflatten(0, rows))

    def divergence(self, now: Matching, reference: Matching, piece: DiffusionBatch) -> Tensor:
        """Computes the mean squared difference of two velocities, [b, t].

        See "DiffusionNFT", https://arxiv.org/abs/2509.16117, whose published code adds it.
        """
        return (now.velocity - reference.velocity).square().flatten(2).mean(2)
