"""Trains the transformer and the three text encoders of the tiny model by flow matching.

The learning rate stays constant after the warm-up and the weights are averaged, so training can end
at any step. It ends as soon as held-out words are written well enough. That is not too well, since
reinforcement learning shall improve the model.

Legend: B samples of a batch, N words of the pool, L text tokens (those of CLIP, then those of T5),
E their width; latents are [., 8, H/4, W/4].
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from diffusers import AutoencoderKL, StableDiffusion3Pipeline
from torch import Tensor, nn

from bundled_models import glyphs, tiny_sd3
from bundled_models.evaluate import Readability
from bundled_models.train_vae import encode

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class FlowConfig:
    """The settings of the training.

    Attributes:
      target_reward: the first evaluation that reaches it ends the training.
      max_steps: the most steps.
      eval_every: steps between two evaluations.
      batch_size: pictures of a step.
      pool_size: pictures that the batches are drawn from.
      lr: learning rate of AdamW.
      weight_decay: of AdamW.
      warmup_steps: steps in which the learning rate rises.
      caption_dropout: fraction of empty prompts, for classifier-free guidance.
      ema_decay: decay of the averaged weights per step.
    """

    target_reward: float = 0.43
    max_steps: int = 8000
    eval_every: int = 200
    batch_size: int = 64
    pool_size: int = 40000
    lr: float = 1.5e-3
    weight_decay: float = 0.01
    warmup_steps: int = 200
    caption_dropout: float = 0.1
    ema_decay: float = 0.998


@dataclass(frozen=True, kw_only=True, slots=True)
class FlowResult:
    """A trained pipeline.

    Attributes:
      pipe: the pipeline with averaged weights.
      num_steps: number of steps that it took.
      loss: mean loss since the evaluation before the last one.
    """

    pipe: StableDiffusion3Pipeline
    num_steps: int
    loss: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Pool:
    """The pictures that batches are drawn from, encoded once.

    Attributes:
      latents: normalised to mean 0 and standard deviation 1, [N, 8, H/4, W/4].
      clip_ids: CLIP's tokens of the prompts, [N, 16].
      t5_ids: T5's tokens of the prompts, [N, 16].
      empty_clip_ids: CLIP's tokens of the empty prompt, [1, 16].
      empty_t5_ids: T5's tokens of the empty prompt, [1, 16].
    """

    latents: Tensor
    clip_ids: Tensor
    t5_ids: Tensor
    empty_clip_ids: Tensor
    empty_t5_ids: Tensor


def train_flow(
    config: FlowConfig,
    vae: AutoencoderKL,
    *,
    exclude: Collection[str],
    seed: int,
    evaluate: Callable[[StableDiffusion3Pipeline, int], Readability],
) -> FlowResult:
    """Trains until an evaluation reaches the target.

    Args:
      config: the settings.
      vae: the trained VAE.
      exclude: words that are never trained on.
      seed: seed of the initial weights, the pool and the batches.
      evaluate: scores a pipeline with averaged weights after some step.

    Returns:
      The trained pipeline.

    Raises:
      RuntimeError: the target is not reached within `max_steps`.
    """
    torch.manual_seed(seed)  # for the initial weights
    pipe = tiny_sd3.pipeline(vae)
    averaged = tiny_sd3.pipeline(vae)
    parameters = _trained(pipe)
    averages = _trained(averaged).requires_grad_(False)
    averages.load_state_dict(parameters.state_dict())
    _check_layout(pipe)
    pool = _make_pool(config, pipe, exclude=exclude, seed=seed)
    logger.info(
        "flow: %d pictures, latent standard deviation %.3f", len(pool.latents), pool.latents.std()
    )
    generator = torch.Generator().manual_seed(seed)
    optimizer = _optimizer(parameters, config)
    losses: list[Tensor] = []
    start = time.perf_counter()
    for step in range(1, config.max_steps + 1):
        optimizer.param_groups[0]["lr"] = config.lr * min(1.0, step / config.warmup_steps)
        loss = _loss(pipe, pool, config, generator)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters.parameters(), 1.0)
        optimizer.step()
        # Early averages forget faster, or the initial weights would stay in them for long.
        _average(averages, parameters, min(config.ema_decay, step / (step + 10)))
        losses.append(loss.detach())
        if step % config.eval_every:
            continue
        mean_loss = torch.stack(losses).mean().item()
        losses.clear()
        score = evaluate(averaged, step)
        values = (step, mean_loss, score.reward, score.exact, time.perf_counter() - start)
        logger.info("flow step %d: loss %.4f, held-out reward %.3f, exact %.3f, %.0f s", *values)
        if score.reward >= config.target_reward:
            return FlowResult(pipe=averaged, num_steps=step, loss=mean_loss)
    raise RuntimeError(
        f"the held-out reward stayed below {config.target_reward} for {config.max_steps} steps"
    )


def _optimizer(parameters: nn.Module, config: FlowConfig) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        parameters.parameters(),
        lr=config.lr,
        betas=(0.9, 0.99),
        weight_decay=config.weight_decay,
        fused=True,
    )


def encode_text(
    pipe: StableDiffusion3Pipeline, clip_ids: Tensor, t5_ids: Tensor
) -> tuple[Tensor, Tensor]:
    """Encodes tokens as `pipe.encode_prompt` does, with gradient.

    Args:
      pipe: the pipeline, whose text encoders are used.
      clip_ids: CLIP's tokens, [B, 16].
      t5_ids: T5's tokens, [B, 16].

    Returns:
      Embeddings of the tokens, [B, L, E], and pooled ones, [B, 64].
    """
    clips = [
        encoder(clip_ids, output_hidden_states=True)
        for encoder in (pipe.text_encoder, pipe.text_encoder_2)
    ]
    clip_embeds = torch.cat([output.hidden_states[-2] for output in clips], dim=-1)
    pooled = torch.cat([output.text_embeds for output in clips], dim=-1)
    t5_embeds = pipe.text_encoder_3(t5_ids).last_hidden_state
    return torch.cat([clip_embeds, t5_embeds], dim=1), pooled


def _loss(
    pipe: StableDiffusion3Pipeline, pool: Pool, config: FlowConfig, generator: torch.Generator
) -> Tensor:
    """Flow-matching error with logit-normal times and caption dropout.

        mean[(v(x, sigma) - (noise - data))^2],   x = (1 - sigma) data + sigma noise

    See "Scaling Rectified Flow Transformers", https://arxiv.org/abs/2403.03206, section 3.1.
    """
    B = config.batch_size
    rows = torch.randint(len(pool.latents), (B,), generator=generator)
    dropped = torch.rand(B, 1, generator=generator) < config.caption_dropout
    clip_ids = torch.where(dropped, pool.empty_clip_ids, pool.clip_ids[rows])
    t5_ids = torch.where(dropped, pool.empty_t5_ids, pool.t5_ids[rows])

    data = pool.latents[rows]
    noise = torch.randn(data.shape, generator=generator)
    sigma = torch.randn(B, generator=generator).sigmoid()
    noisy = torch.lerp(data, noise, sigma.view(B, 1, 1, 1))
    embeds, pooled = encode_text(pipe, clip_ids, t5_ids)
    velocity = pipe.transformer(
        hidden_states=noisy,
        encoder_hidden_states=embeds,
        pooled_projections=pooled,
        timestep=sigma * 1000,
    ).sample
    return (velocity - (noise - data)).square().mean()


def _make_pool(
    config: FlowConfig, pipe: StableDiffusion3Pipeline, *, exclude: Collection[str], seed: int
) -> Pool:
    rng = np.random.default_rng(seed)
    words = glyphs.distinct_words(config.pool_size, rng, exclude=exclude)
    pixels_NCHW = torch.from_numpy(glyphs.render_all(words, rng)).permute(0, 3, 1, 2)
    encoded = encode(pipe.vae, pixels_NCHW)
    latents = (encoded - pipe.vae.config.shift_factor) * pipe.vae.config.scaling_factor
    clip_ids, t5_ids = _token_ids(pipe, [glyphs.prompt(word) for word in words])
    empty_clip_ids, empty_t5_ids = _token_ids(pipe, [""])
    return Pool(
        latents=latents,
        clip_ids=clip_ids,
        t5_ids=t5_ids,
        empty_clip_ids=empty_clip_ids,
        empty_t5_ids=empty_t5_ids,
    )


def _token_ids(pipe: StableDiffusion3Pipeline, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Token ids of CLIP and of T5, [N, 16] each. Both CLIPs have the same tokenizer."""
    length = tiny_sd3.MAX_TEXT_LENGTH
    clip_ids, t5_ids = (
        tokenizer(
            prompts, padding="max_length", max_length=length, truncation=True, return_tensors="pt"
        ).input_ids
        for tokenizer in (pipe.tokenizer, pipe.tokenizer_3)
    )
    return clip_ids, t5_ids


@torch.no_grad()
def _check_layout(pipe: StableDiffusion3Pipeline) -> None:
    """Checks that training feeds the transformer what the stock pipeline feeds it."""
    prompts = [glyphs.prompt("AB7X"), ""]
    embeds, pooled = encode_text(pipe, *_token_ids(pipe, prompts))
    expected_embeds, _, expected_pooled, _ = pipe.encode_prompt(
        prompts,
        None,
        None,
        do_classifier_free_guidance=False,
        max_sequence_length=tiny_sd3.MAX_TEXT_LENGTH,
    )
    assert torch.equal(embeds, expected_embeds)
    assert torch.equal(pooled, expected_pooled)


def _trained(pipe: StableDiffusion3Pipeline) -> nn.ModuleList:
    return nn.ModuleList(
        [pipe.transformer, pipe.text_encoder, pipe.text_encoder_2, pipe.text_encoder_3]
    )


@torch.no_grad()
def _average(averages: nn.Module, parameters: nn.Module, decay: float) -> None:
    for average, parameter in zip(averages.parameters(), parameters.parameters(), strict=True):
        average.lerp_(parameter, 1 - decay)
