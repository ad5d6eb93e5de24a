"""The bundled Stable Diffusion 3 as a problem of the gradient study: prompts, rewards, gradients.

Legend: E estimators, B samples, T steps of the SDE window, P trained numbers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from estimators import Estimator
from gradient_problem import Evaluation
from gradient_regions import unbounded
from learning_rollouts import FewBits
from torch import Tensor

from flowgrpo_rc import assets
from flowgrpo_rc.batch import DiffusionBatch, Prompt, PromptBatch, SamplerSpec
from flowgrpo_rc.core.random import derive_seed
from flowgrpo_rc.models.base import ModelConfig, load_model
from flowgrpo_rc.models.lora import add_lora, lora_parameters
from flowgrpo_rc.policies.flow import FlowPolicy
from flowgrpo_rc.rollout.diffusers_engine import DiffusersEngine
from flowgrpo_rc.rollout.engine import ImageRequest, RolloutChunk

sys.path.append(str(Path(__file__).parents[1]))  # examples/
from bundled_models import glyphs

SEED = 0
RANK = 4
WINDOW = (1, 2, 3)  # the stochastic steps
PROMPTS = 8  # of a batch
SAMPLES = 12  # of a prompt
LEARNING_RATE = 1e-3
SPEC = SamplerSpec(
    dtype="fp32",
    height=glyphs.HEIGHT,
    width=glyphs.WIDTH,
    num_inference_steps=10,
    guidance_scale=1.0,
    noise_level=1.0,
    sde_type="sde",
    log_prob_convention="gaussian",
    max_sequence_length=16,
)

Lora = dict[str, Tensor]


class Cached(DiffusersEngine):
    """Skips the middle blocks on every second step, also of the window."""

    def generate(self, request: ImageRequest) -> Iterator[RolloutChunk]:
        """Samples as asked, but for the cache."""
        steps = range(1, request.spec.num_inference_steps, 2)
        spec = replace(request.spec, cached_steps=tuple(steps), cached_blocks=(1, 1))
        yield from super().generate(replace(request, spec=spec))


class Images:
    """The bundled model as a problem: prompts, rewards, batches, gradients."""

    def __init__(self) -> None:
        config = ModelConfig(
            path=str(assets.path("tiny_glyph_sd3")), lora_rank=RANK, lora_alpha=2 * RANK
        )
        self.model = load_model(config, torch.device("cpu"))
        self.network = add_lora(self.model, config, SEED)
        self.policy = FlowPolicy(self.model, self.network)
        self.words = assets.path("prompts/glyph_train.txt").read_text().split()
        self.exact = self.engine("exact")

    def engine(self, rollout: str, versions: Sequence[Lora] = ()) -> DiffusersEngine:
        """Makes the engine of a rollout, given by its name, with the LoRA as it is.

        Args:
          rollout: one of `Plan.rollouts`.
          versions: the LoRA after each update, for old rollouts.
        """
        size = {"chunk_size": PROMPTS * SAMPLES}
        lora = self.lora()
        if rollout == "int4":
            engine = DiffusersEngine(
                self.model, self.network, dtype="bf16", quantization="int4", **size
            )
        elif rollout == "bits2":
            engine = FewBits(self.model, self.network, dtype="bf16", bits=2, **size)
        elif rollout == "bf16":
            engine = DiffusersEngine(self.model, self.network, dtype="bf16", **size)
        elif rollout == "cached":
            engine = Cached(self.model, self.network, dtype="fp32", cached_blocks=(1, 1), **size)
        else:
            engine = DiffusersEngine(self.model, self.network, dtype="fp32", **size)
            if rollout.startswith("stale"):
                lora = versions[-1 - int(rollout.removeprefix("stale_"))]
        engine.sync_weights(lora, 0)
        return engine

    def lora(self) -> Lora:
        """Returns a copy of the LoRA's tensors by name."""
        return {name: p.detach().clone() for name, p in lora_parameters(self.network).items()}

    def load(self, lora: Mapping[str, Tensor]) -> None:
        """Puts the tensors of a LoRA into the policy."""
        for name, parameter in lora_parameters(self.network).items():
            parameter.data.copy_(lora[name])

    @torch.no_grad()
    def rollout(
        self, engine: DiffusersEngine, index: int, samples: int = SAMPLES
    ) -> tuple[DiffusionBatch, Tensor]:
        """Samples a batch; prompts and noise depend on its number alone.

        Args:
          engine: samples it.
          index: number of the batch.
          samples: of each prompt.

        Returns:
          The batch, and its rewards [B].
        """
        draw = np.random.default_rng(derive_seed(SEED, index, "words"))
        words = [self.words[i].strip('"') for i in draw.integers(len(self.words), size=PROMPTS)]
        prompts = [
            Prompt(text=glyphs.prompt(word), index=i, target=word, negative_text="")
            for i, word in enumerate(words)
        ]
        count = PROMPTS * samples
        request = ImageRequest(
            prompts=PromptBatch(step=index, prompts=prompts, slots=list(range(PROMPTS))),
            samples_per_prompt=samples,
            spec=SPEC,
            window=torch.tensor(WINDOW).expand(count, -1),
            seeds=[derive_seed(SEED, index, row) for row in range(count)],
            keep_means=True,
            decode=False,
        )
        (chunk,) = engine.generate(request)
        assert isinstance(chunk.batch, DiffusionBatch)
        assert chunk.latents is not None
        target = self._targets(words).repeat_interleave(samples, 0)
        reward = -((chunk.latents - target) ** 2).flatten(1).mean(1)
        return chunk.batch, reward.double()

    def _targets(self, words: Sequence[str]) -> Tensor:
        """Latents of renderings of words, all in the same colours and the same place."""
        drawn = np.stack([glyphs.render(word, np.random.default_rng(0)) for word in words])
        pixels = torch.tensor(drawn).permute(0, 3, 1, 2).float() / 127.5 - 1
        vae = self.model.pipeline.vae
        mean = vae.encode(pixels).latent_dist.mean
        found: Tensor = (mean - vae.config.shift_factor) * vae.config.scaling_factor
        return found

    def evaluation(self, batch: DiffusionBatch) -> Evaluation:
        """Evaluates the policy on every step of a batch, without slopes."""
        found = self.policy.measure(batch, len(batch), keep_means=True)
        assert found.gaussian is not None
        assert found.means is not None
        return Evaluation(
            found.log_probs,
            found.gaussian,
            found.means,
            torch.zeros_like(found.log_probs),
            torch.zeros(3, 0),
        )

    def gradients(
        self, engine: DiffusersEngine, given: Mapping[str, Estimator], index: int
    ) -> Tensor:
        """Computes the gradients of estimators on a batch, [E, P].

        Args:
          engine: samples the batch.
          given: the estimators by name.
          index: number of the batch.
        """
        batch, rewards = self.rollout(engine, index)
        found = self.evaluation(batch)
        slopes = torch.stack(
            [
                estimator.coefficients(estimator.settle(batch, found), rewards, found)[0]
                for estimator in given.values()
            ]
        )
        parameters = list(lora_parameters(self.network).values())
        total = torch.zeros(len(given), sum(p.numel() for p in parameters))
        for t, piece in enumerate(self.policy.pieces(batch)):
            now = self.policy.evaluate(piece)
            assert now.gaussian.kl is not None
            for row, slope in zip(total, slopes[..., t], strict=True):
                value = (slope[0] * now.log_probs[:, 0] + slope[1] * now.gaussian.kl[:, 0]).sum()
                parts = torch.autograd.grad(value, parameters, retain_graph=True)
                row += torch.cat([part.flatten() for part in parts])
        return total

    def train(self, updates: int) -> list[Lora]:
        """Trains by FlowGRPO on the policy's own samples; returns the LoRA after each update."""
        given = {"exact": unbounded()["bypass_plain_none"]}
        parameters = list(lora_parameters(self.network).values())
        optimizer = torch.optim.Adam(parameters, lr=LEARNING_RATE)
        versions = [self.lora()]
        for index in range(updates):
            self.exact.sync_weights(self.lora(), index)
            gradient = self.gradients(self.exact, given, -1 - index)[0]
            parts = gradient.split([parameter.numel() for parameter in parameters])
            for parameter, part in zip(parameters, parts, strict=True):
                parameter.grad = part.view_as(parameter)
            optimizer.step()
            versions.append(self.lora())
        self.exact.sync_weights(self.lora(), updates)
        return versions
