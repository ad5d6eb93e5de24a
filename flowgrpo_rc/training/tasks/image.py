"""Images or videos of a flow model: SDE windows for training, ODE samples for evaluation."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from flowgrpo_rc.batch import DiffusionBatch, Prompt, PromptBatch
from flowgrpo_rc.core.metrics import MetricBag
from flowgrpo_rc.core.random import normal
from flowgrpo_rc.core.schedule import draw_windows
from flowgrpo_rc.correction.correct import require_rollout_log_probs
from flowgrpo_rc.correction.thresholds import KEY
from flowgrpo_rc.evaluation.held_out import HeldOut
from flowgrpo_rc.losses.base import DIFFUSION_KEY
from flowgrpo_rc.losses.config import DiffusionLossConfig
from flowgrpo_rc.models.base import FlowModel
from flowgrpo_rc.models.prompt_cache import PromptCache
from flowgrpo_rc.monitoring.conditioning import EVERY, conditioning_error
from flowgrpo_rc.monitoring.noise import observe_noise
from flowgrpo_rc.monitoring.pictures import observe_pictures
from flowgrpo_rc.policies.encode_prompts import encode_prompts
from flowgrpo_rc.policies.flow import FlowPolicy, no_window
from flowgrpo_rc.records.samples import Shown, film_strips, save_animation, save_grid, with_sources
from flowgrpo_rc.rollout.config import RolloutConfig
from flowgrpo_rc.rollout.engine import ImageRequest
from flowgrpo_rc.training.tasks.task import Task

_LIMIT = 2**30  # bytes of the host for held-out prompts, where nothing else keeps prompts


@dataclass(eq=False)
class ImageTask(Task):
    """The task of a flow model."""

    model: FlowModel
    policy: FlowPolicy
    config: RolloutConfig
    seed: int
    _: KW_ONLY
    keep_means: bool = False  # whether the rollout has to record the means of its steps
    decode: bool = True  # whether samples are needed beside their latents
    seeded: bool = False  # whether the engine says that it draws the noise of the samples' seeds
    tf32: bool = False  # whether products of fp32 matrices round to TF32, here and in the update

    def __post_init__(self) -> None:
        """Prepares the sampler of held-out samples, which keeps their encoded prompts."""
        self._held_out = self.config.held_out_spec()
        self._cache = self.model.prompt_cache or PromptCache({}, None, by_batch=True, limit=_LIMIT)

    def request(self, prompts: PromptBatch, seeds: Sequence[int]) -> ImageRequest:
        """Asks for `rollout.n` samples of each prompt, with the windows that are drawn for them."""
        config = self.config
        window = draw_windows(
            prompts.slots,
            config.n,
            window=config.window_at(prompts.step),
            sharing=config.algo.window_sharing,
            seed=self.seed,
            step=prompts.step,
        )
        return ImageRequest(
            prompts=prompts,
            samples_per_prompt=config.n,
            spec=config.spec(prompts.step, tf32=self.tf32),
            window=window,
            seeds=seeds,
            keep_means=self.keep_means,
            decode=self.decode,
        )

    def origin(self) -> dict[str, object]:
        """Returns the shape of the latents and where the SDE window may lie."""
        return {
            "latent_shape": list(self.model.latent_shape(self.config.spec())),
            "window": list(self.config.window()),
            "window_sharing": self.config.algo.window_sharing,
        }

    def check_rollout(self, batch: DiffusionBatch) -> None:
        """Raises ValueError unless the rollout has log-probs, our schedule and needed means."""
        require_rollout_log_probs(batch)
        self.model.walked_schedule(batch.spec).check(batch)
        if batch.negative is None and self.model.cfg_scale(batch.spec) > 1:
            raise ValueError(
                "the rollout recorded no negative prompts, without which training would drop the "
                f"guidance too (rollout.pipeline.{self.model.cfg_key}): use another engine"
            )
        if self.keep_means and batch.prev_sample_mean is None:
            raise ValueError(
                "the correction, the loss or a criterion compares the means of the steps with "
                "those of the rollout, which did not record any (prev_sample_mean): use another "
                f"engine or rollout, or set {KEY}.centered=false and do without "
                f"{KEY}.rollout_rs=step_kl and, in bypass mode, with "
                f"{DIFFUSION_KEY}.loss_mode={DiffusionLossConfig.loss_mode}"
            )

    def observe(self, batch: DiffusionBatch, shown: Shown, step: int) -> MetricBag:
        """Measures what an engine stores, draws and encodes, and its pictures.

        The share of latents that 16 bits hold is 1 if an engine rounds what it stores, and one in
        thousands if not. Prompts are encoded again in step 1 and every `EVERY` steps.
        """
        metrics = observe_noise(batch, seeded=self.seeded)
        stored = batch.all_latents[:, -1]
        metrics.mean("rollout/latents_16bit_fraction", (stored == stored.half()).double())
        if shown.prompts and step % EVERY == 1:
            error = conditioning_error(self.model, batch, shown.prompts)
            metrics.max("rollout/conditioning_error_max", error)
        if shown.facts is not None:
            metrics.merge(observe_pictures(shown.facts, batch.group.cpu()))
        return metrics

    @torch.no_grad()
    def sample(
        self, prompts: Sequence[Prompt], seeds: Sequence[int], *, decode: bool = True
    ) -> HeldOut:
        """Samples images [N, H, W, 3] or videos [N, F, H, W, 3] uint8, by the ODE."""
        model = self.model
        spec = self._held_out
        latents = normal(model.latent_shape(spec), seeds, "latents").to(model.device)
        conditioning, negative = encode_prompts(model, prompts, spec, self._cache)
        trajectory = self.policy.rollout(
            latents,
            conditioning,
            negative,
            spec,
            no_window(len(prompts), model.device),
        )
        return HeldOut(model.decode(trajectory.final, spec) if decode else None, trajectory.final)

    def save_samples(
        self,
        stem: Path,
        samples: Sequence[object],
        prompts: Sequence[Prompt],
        scores: Sequence[float],
    ) -> Image.Image | None:
        """Writes a captioned grid, `stem`.png, and videos to `stem`.webp as well."""
        captions = [
            f"{p.target or p.text} {score:.2f}" for p, score in zip(prompts, scores, strict=True)
        ]
        pictures = np.asarray(samples)
        if self.model.makes == "video":
            save_animation(stem.with_suffix(".webp"), pictures, captions)
            pictures = film_strips(pictures)
        texts = [prompt.text for prompt in prompts]
        path = stem.with_suffix(".png")
        return save_grid(path, with_sources(pictures, prompts), captions, texts)
