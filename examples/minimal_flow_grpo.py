"""FlowGRPO with rollout correction, the whole method in one file: https://arxiv.org/abs/2505.05470.

    python examples/minimal_flow_grpo.py
    python examples/minimal_flow_grpo.py --mode decoupled

A small Stable Diffusion 3 that draws words on grounds of any colour learns to draw them on blue
ones, in twenty seconds on one core. Images are sampled by a bf16 copy of the network and trained in
fp32. So the two disagree a little about the probability of each step, and that is corrected. From
top to bottom, in the order of a training step:

    prompts -> rollout with log-probs -> rewards -> group advantages -> correction -> PPO clip ->
    optimizer step

The mathematics and the bundled model come from the package. The package's own trainer adds the
rest: other models and engines, several GPUs, evaluation, checkpoints, reports.

Legend: P prompts, G images of each, B = P G; T stochastic steps; b rows of a mini-batch; C, h, w
channels, height and width of the latents; H, W height and width of an image.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from diffusers import StableDiffusion3Pipeline
from diffusers.utils import make_image_grid
from peft import LoraConfig
from torch import Tensor

from flowgrpo_rc import assets
from flowgrpo_rc.core.advantages import group_relative
from flowgrpo_rc.core.random import derive_seed, normal
from flowgrpo_rc.core.schedule import draw_windows
from flowgrpo_rc.core.transition import Transition, log_prob, sample, transition
from flowgrpo_rc.correction.api import (
    CorrectionResult,
    compute_rollout_correction_and_rejection_mask,
)
from flowgrpo_rc.losses.ppo_clip import ppo_clip

PROMPTS = ['"AB7X"', '"HELP"', '"K9Q"', '"WXY"']
HEIGHT = 32  # of an image, in pixels
WIDTH = 64
GROUP = 8  # images of a prompt, which are compared with each other
DENOISING_STEPS = 6
# WINDOW steps in a row, somewhere in WINDOW_RANGE, are stochastic and trained; the others follow
# the ODE.
WINDOW = 2
WINDOW_RANGE = (0, 4)
NOISE_LEVEL = 1.0
MINI_BATCHES = 2  # updates for one rollout
LEARNING_RATE = 2e-3
# It must be above the mismatch of the bf16 rollout, which is about 1e-4 here. Otherwise noise
# decides what is trained.
CLIP_RATIO = 1e-3
BAND = "0.97_1.03"  # far outside of both, so that only a broken step is rejected

Text = tuple[Tensor, Tensor]  # the encoded prompts: embeddings [b, L, E], pooled [b, E']


class Rollout(NamedTuple):
    """Sampled images, with a record of their stochastic steps.

    Attributes:
      steps: [T]; the steps of the schedule that were stochastic.
      states: latents before and after these steps, [B, T+1, C, h, w].
      log_probs: of these steps under the policy that sampled, [B, T].
      final: latents of the images, [B, C, h, w].
    """

    steps: list[int]
    states: Tensor
    log_probs: Tensor
    final: Tensor


# --- the policy: a denoising step is a Gaussian


def gaussian_step(
    network: Any, x: Tensor, index: int, sigmas: Tensor, text: Text, noise_level: float
) -> Transition:
    """Computes the Gaussian of step `index` from x [b, C, h, w]. Rollout and training both use it.

    The network predicts a velocity, and the SDE turns it into a mean and a standard deviation.
    Without noise the step follows the ODE.
    """
    sigma = sigmas[index].expand(len(x))
    sigma_next = sigmas[index + 1].expand(len(x))
    velocity = network(
        hidden_states=x.to(network.dtype),
        timestep=1000 * sigma,
        encoder_hidden_states=text[0].to(network.dtype),
        pooled_projections=text[1].to(network.dtype),
        return_dict=False,
    )[0].float()
    return transition(
        x, velocity, sigma, sigma_next, kind="sde", noise_level=noise_level, sigma_max=sigmas[1]
    )


@torch.no_grad()
def roll_out(
    sampler: Any, sigmas: Tensor, text: Text, shape: Sequence[int], seed: int, steps: list[int]
) -> Rollout:
    """Samples one image of `shape` for each row of `text`, and records the stochastic `steps`.

    These steps are consecutive; all others follow the ODE.
    """
    seeds = [derive_seed(seed, row) for row in range(len(text[0]))]
    x = normal(shape, seeds, "latents")
    states = []
    log_probs = []
    for index in range(len(sigmas) - 1):
        if index in steps:
            step = gaussian_step(sampler, x, index, sigmas, text, NOISE_LEVEL)
            states.append(x)
            x = sample(step, normal(shape, seeds, "noise", index))
            log_probs.append(log_prob(step, x))
        else:
            if len(states) == len(steps):  # the state after the last stochastic step
                states.append(x)
            x = gaussian_step(sampler, x, index, sigmas, text, 0.0).mean
    recorded = torch.stack(log_probs, 1) if steps else x.new_zeros(len(x), 0)
    return Rollout(steps, torch.stack(states, 1), recorded, x)


def step_log_prob(
    network: Any, data: Rollout, rows: Tensor, t: int, sigmas: Tensor, text: Text
) -> Tensor:
    """Computes log p(state t+1 | state t) of recorded images under `network`, [b, 1]."""
    own = (text[0][rows], text[1][rows])
    step = gaussian_step(network, data.states[rows, t], data.steps[t], sigmas, own, NOISE_LEVEL)
    return log_prob(step, data.states[rows, t + 1]).unsqueeze(1)


# --- the reward


def blueness(images: Tensor) -> Tensor:
    """Computes the reward [B] of images [B, 3, H, W] in 0 to 1. Yours goes here."""
    red, green, blue = images.mean((2, 3)).unbind(1)
    return blue - (red + green) / 2


@torch.no_grad()
def decode(pipe: Any, latents: Tensor) -> Tensor:
    """Decodes latents [B, C, h, w] to images [B, 3, H, W] in 0 to 1."""
    config = pipe.vae.config
    images = pipe.vae.decode(
        latents / config.scaling_factor + config.shift_factor, return_dict=False
    )[0]
    return (images / 2 + 0.5).clamp(0, 1)


# --- the loss


class Targets(NamedTuple):
    """The numbers that log-probs are trained on, all [b, T].

    Attributes:
      recorded: log-probs of the policy that sampled.
      old: log-probs of the policy that the clip is about.
      advantages: advantage of the image that each step belongs to.
      weights: correction weights.
      kept: False for rejected steps.
    """

    recorded: Tensor
    old: Tensor
    advantages: Tensor
    weights: Tensor
    kept: Tensor

    def part(self, rows: Tensor, t: int) -> Targets:
        """Returns step t of some rows, [b, 1]."""
        return Targets(*(values[rows, t : t + 1] for values in self))


def correct(training: Tensor, recorded: Tensor, rollout_is: str | None = None) -> CorrectionResult:
    """Computes weights (with `rollout_is`) and rejection from the ratio of two policies.

    The ratio is that of the policy that trains to the one that sampled; log-probs [b, T].
    """
    return compute_rollout_correction_and_rejection_mask(
        training.detach(),
        recorded,
        torch.ones_like(recorded, dtype=torch.bool),
        rollout_is=rollout_is,
        rollout_rs="token_k1",
        rollout_rs_threshold=BAND,
    )


def make_targets(recorded: Tensor, recomputed: Tensor | None, advantages: Tensor) -> Targets:
    """Chooses the policy that the clip is about, and corrects for the difference to it.

    Bypass mode, without `recomputed`, has two policies. The clip is about the rollout's own
    log-probs, so the ratio in the loss is already the weight.

    Decoupled mode has three policies. The clip is about the log-probs of the training graph before
    the update. Weights and rejection, found once, correct for the difference of the rollout to it.
    """
    if recomputed is None:
        ones = torch.ones_like(recorded)
        return Targets(recorded, recorded, advantages, ones, ones.bool())
    weights, kept, _ = correct(recomputed, recorded, rollout_is="token")
    return Targets(recorded, recomputed, advantages, weights, kept)


def policy_loss(log_probs: Tensor, targets: Targets, *, bypass: bool) -> tuple[Tensor, float]:
    """Computes PPO's clipped loss of the current log-probs [b, T], and the fraction that it clips.

    In bypass mode steps are rejected here, by the ratio of the current policy to the rollout's.
    """
    kept = correct(log_probs, targets.recorded).mask if bypass else targets.kept
    steps = ppo_clip(
        log_probs - targets.old, targets.advantages, kept, clip_low=CLIP_RATIO, clip_high=CLIP_RATIO
    )
    return (steps.values * targets.weights).mean(), steps.metrics.compute()["clip_fraction"]


# --- training


class Setup(NamedTuple):
    """Everything that a training step needs."""

    pipe: Any  # the bundled pipeline; its transformer has a LoRA and is trained
    sampler: Any  # a bf16 copy of the transformer, which samples
    text: Text  # the encoded prompt of each image, [B]
    group: Tensor  # the prompt of each image, [B]
    sigmas: Tensor  # the noise levels of the schedule
    shape: Sequence[int]  # (C, h, w)
    lora: dict[str, Tensor]  # the trained parameters by name
    optimizer: torch.optim.Optimizer


def load(seed: int) -> Setup:
    """Loads the bundled pipeline, and puts a LoRA on its transformer."""
    pipe = StableDiffusion3Pipeline.from_pretrained(assets.path("tiny_glyph_sd3"))
    with torch.no_grad():
        embeds, _, pooled, _ = pipe.encode_prompt(
            PROMPTS, None, None, do_classifier_free_guidance=False, max_sequence_length=16
        )
    torch.manual_seed(seed)
    trainer = pipe.transformer
    trainer.requires_grad_(False).eval()
    targets = r".*attn\.to_(q|k|v|out\.0)"
    trainer.add_adapter(
        LoraConfig(r=16, lora_alpha=32, init_lora_weights="gaussian", target_modules=targets)
    )
    pipe.scheduler.set_timesteps(DENOISING_STEPS)
    sampler = copy.deepcopy(trainer).to(torch.bfloat16)
    group = torch.arange(len(PROMPTS)).repeat_interleave(GROUP)
    factor = pipe.vae_scale_factor
    shape = (trainer.config.in_channels, HEIGHT // factor, WIDTH // factor)
    lora = {name: tensor for name, tensor in trainer.named_parameters() if tensor.requires_grad}
    optimizer = torch.optim.AdamW(lora.values(), lr=LEARNING_RATE)
    text = (embeds[group], pooled[group])
    return Setup(pipe, sampler, text, group, pipe.scheduler.sigmas, shape, lora, optimizer)


def held_out(setup: Setup) -> Tensor:
    """Samples images with the trained network, by the ODE, from noise that training never sees."""
    pipe, _, text, _, sigmas, shape, *_ = setup
    final = roll_out(pipe.transformer, sigmas, text, shape, derive_seed("held out"), []).final
    return decode(pipe, final)


def train_step(setup: Setup, iteration: int, seed: int, *, bypass: bool) -> str:
    """Takes one training step and returns a line about it."""
    pipe, sampler, text, group, sigmas, shape, lora, optimizer = setup
    trainer = pipe.transformer
    everyone = torch.arange(len(group))

    span = (WINDOW, *WINDOW_RANGE)
    window = draw_windows([0], 1, window=span, sharing="batch", seed=seed, step=iteration)
    steps = window[0].tolist()
    data = roll_out(sampler, sigmas, text, shape, derive_seed(seed, iteration), steps)
    rewards = blueness(decode(pipe, data.final))
    valid = torch.ones_like(group).bool()
    advantages = group_relative(rewards, group, valid, global_std=True).values.float().clamp(-5, 5)
    # All steps of an image have its advantage.
    advantages = advantages.unsqueeze(1).expand(-1, WINDOW)
    # Bypass mode needs these log-probs for nothing but the printed mismatch.
    with torch.no_grad():
        old = [step_log_prob(trainer, data, everyone, t, sigmas, text) for t in range(WINDOW)]
    old = torch.cat(old, 1)
    # Before any update the weights are the same, so this is the difference of the precisions.
    mismatch = (old - data.log_probs).abs().mean()

    targets = make_targets(data.log_probs, None if bypass else old, advantages)
    for rows in everyone.chunk(MINI_BATCHES):
        # One step at a time takes the memory of one forward.
        for t in range(WINDOW):
            log_probs = step_log_prob(trainer, data, rows, t, sigmas, text)
            loss, clipped = policy_loss(log_probs, targets.part(rows, t), bypass=bypass)
            (loss / WINDOW).backward()
        torch.nn.utils.clip_grad_norm_(lora.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    sampler.load_state_dict({name: tensor.detach() for name, tensor in lora.items()}, strict=False)
    return f"reward {rewards.mean():+.3f}  mismatch {mismatch:.1e}  last clipped {clipped:.2f}"


def main(argv: Sequence[str] | None = None) -> tuple[float, float]:
    """Trains, and returns the reward of held-out images before and after."""
    parser = argparse.ArgumentParser(description="FlowGRPO in one file")
    parser.add_argument("--mode", choices=["bypass", "decoupled"], default="bypass")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", default="blue.png", help="images before training (upper half) and after"
    )
    args = parser.parse_args(argv)

    setup = load(args.seed)
    before = held_out(setup)
    for iteration in range(1, args.steps + 1):
        line = train_step(setup, iteration, args.seed, bypass=args.mode == "bypass")
        print(f"step {iteration:2}  {line}")
    after = held_out(setup)
    scores = (blueness(before).mean().item(), blueness(after).mean().item())
    print(
        f"reward of {len(after)} held-out images: {scores[0]:+.3f} before, {scores[1]:+.3f} after"
    )
    shown = torch.cat([before[::2], after[::2]]).permute(0, 2, 3, 1).numpy()
    images = setup.pipe.image_processor.numpy_to_pil(shown)
    make_image_grid(images, rows=len(images) // 8, cols=8).save(args.out)
    return scores


if __name__ == "__main__":
    main()
