"""Images or videos of a flow model: SDE windows for training, ODE samples for evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from flowgrpo_rc.batch import DiffusionBatch, Prompt, PromptBatch
from flowgrpo_rc.core.metrics import MetricBag
from flowgrpo_rc.core.random import derive_seed, normal
from flowgrpo_rc.core.schedule import draw_windows
from flowgrpo_rc.correction.correct import require_rollout_log_probs
from flowgrpo_rc.correction.thresholds import KEY
from flowgrpo_rc.losses.base import DIFFUSION_KEY
from flowgrpo_rc.losses.config import DiffusionLossConfig, LossConfig
from flowgrpo_rc.losses.diffusion import DiffusionObjective
from flowgrpo_rc.models.base import FlowModel
from flowgrpo_rc.monitoring.images import observe_images
from flowgrpo_rc.policies.encode_prompts import encode_prompts
from flowgrpo_rc.policies.flow import FlowPolicy
from flowgrpo_rc.records.samples import film_strips, save_animation, save_grid
from flowgrpo_rc.rollout.config import RolloutConfig
from flowgrpo_rc.rollout.engine import ImageRequest
from flowgrpo_rc.training.tasks.task import HeldOut, Task


class ImageTask(Task):
    """The task of a flow model.

    The noise of a held-out sample follows from rollout.val_kwargs.seed and the prompt's position,
    so the samples of two evaluations differ by the weights alone.
    """

    model: FlowModel
    policy: FlowPolicy

    def __init__(
        self,
        model: FlowModel,
        policy: FlowPolicy,
        config: RolloutConfig,
        seed: int,
        *,
        keep_means: bool = False,
        decode: bool = True,
        seeded: bool = False,
    ) -> None:
        """Takes the model and how it is sampled.

        Args:
          model: the pipeline.
          policy: the trainer's own view of it.
          config: settings of the rollout.
          seed: the run's seed.
          keep_means: whether the rollout has to record the means of its steps.
          decode: whether samples are needed beside their latents.
          seeded: whether the engine says that it draws the noise of the samples' seeds.
        """
        self.model = model
        self.policy = policy
        self._config = config
        self._seed = seed
        self._keep_means = keep_means
        self._decode = decode
        self._seeded = seeded
        self._held_out = config.held_out_spec()

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Takes every text: encoders cut one that is too long, as in the stock pipeline."""

    def request(self, prompts: PromptBatch, seeds: Sequence[int]) -> ImageRequest:
        """Asks for `rollout.n` samples of each prompt, with the windows that are drawn for them."""
        config = self._config
        size, first, last = config.window()
        window = draw_windows(
            prompts.slots,
            config.n,
            size=size,
            first=first,
            last=last,
            sharing=config.algo.window_sharing,
            seed=self._seed,
            step=prompts.step,
        )
        return ImageRequest(
            prompts=prompts,
            samples_per_prompt=config.n,
            spec=config.spec(),
            window=window,
            seeds=seeds,
            keep_means=self._keep_means,
            decode=self._decode,
        )

    def origin(self) -> dict[str, Any]:
        """Returns the shape of the latents and where the SDE window may lie."""
        return {
            "latent_shape": list(self.model.latent_shape(self._config.spec())),
            "window": list(self._config.window()),
            "window_sharing": self._config.algo.window_sharing,
        }

    def check_rollout(self, batch: DiffusionBatch) -> None:
        """Raises ValueError unless the rollout has log-probs, our schedule and needed means."""
        require_rollout_log_probs(batch)
        self.model.walked_schedule(self._config.spec()).check(batch)
        if batch.negative is None and self.model.cfg_scale(batch.spec) > 1:
            raise ValueError(
                "the rollout recorded no negative prompts, without which training would drop the "
                f"guidance too (rollout.pipeline.{self.model.cfg_key}): use another engine"
            )
        if self._keep_means and batch.prev_sample_mean is None:
            raise ValueError(
                "the correction, the loss or a criterion compares the means of the steps with "
                "those of the rollout, which did not record any (prev_sample_mean): use another "
                f"engine or rollout, or set {KEY}.centered=false and do without "
                f"{KEY}.rollout_rs=step_kl and, in bypass mode, with "
                f"{DIFFUSION_KEY}.loss_mode={DiffusionLossConfig.loss_mode}"
            )

    def objective(self, config: LossConfig) -> DiffusionObjective:
        """Builds the loss of denoising steps."""
        return DiffusionObjective(config)

    def observe(self, batch: DiffusionBatch, prompts: Sequence[Prompt], step: int) -> MetricBag:
        """Measures latents, noise and prompts, with `observe_images`."""
        return observe_images(self.model, batch, prompts, step, seeded=self._seeded)

    @torch.no_grad()
    def sample(self, prompts: Sequence[Prompt], *, decode: bool = True) -> HeldOut:
        """Samples images [N, H, W, 3] or videos [N, F, H, W, 3] uint8, by the ODE."""
        model = self.model
        spec = self._held_out
        latents = self._latents(prompts)
        conditioning, negative = encode_prompts(model, prompts, spec)
        trajectory = self.policy.rollout(
            latents,
            conditioning,
            negative,
            spec,
            torch.empty((len(prompts), 0), dtype=torch.int64, device=model.device),
            lambda step: latents,
        )
        return HeldOut(model.decode(trajectory.final, spec) if decode else None, trajectory.final)

    def save_samples(
        self, stem: Path, samples: Sequence[Any], prompts: Sequence[Prompt], scores: Sequence[float]
    ) -> Image.Image | None:
        """Writes a captioned grid, `stem`.png; for videos three frames, and all in `stem`.webp."""
        captions = [
            f"{p.target or p.text} {score:.2f}" for p, score in zip(prompts, scores, strict=True)
        ]
        pictures = np.asarray(samples)
        if self.model.makes == "video":
            save_animation(stem.with_suffix(".webp"), pictures, captions)
            pictures = film_strips(pictures)
        return save_grid(stem.with_suffix(".png"), pictures, captions)

    def _latents(self, prompts: Sequence[Prompt]) -> Tensor:
        shape = self.model.latent_shape(self._held_out)
        seeds = [
            derive_seed(self._config.val_kwargs.seed, "evaluation", prompt.index)
            for prompt in prompts
        ]
        return normal(shape, seeds, "latents").to(self.model.device)
