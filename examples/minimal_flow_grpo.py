"""FlowGRPO with rollout correction, the whole method in one file: https://arxiv.org/abs/2505.05470.

    python examples/minimal_flow_grpo.py
    python examples/minimal_flow_grpo.py --mode decoupled

A small Stable Diffusion 3 that draws words on grounds of any colour learns to draw them on blue
ones, in twenty seconds of one core. Images are sampled by a bf16 copy of the network and trained in
fp32, so that the two disagree a little about how likely each step was. From top to bottom, as a
training step goes:

    prompts -> rollout with log-probs -> rewards -> group advantages -> correction -> PPO clip ->
    optimizer step

Of the package it takes the mathematics and the bundled model. The trainer of the package adds the
rest: other models and engines, several GPUs, evaluation, checkpoints, reports.

Legend: P prompts, G images of each, B = P G; T stochastic steps; b rows of a mini-batch; C, h, w of
the latents.
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
HEIGHT, WIDTH = 32, 64
GROUP = 8  # images of a prompt, compared with each other
DENOISING_STEPS = 6
WINDOW, WINDOW_RANGE = (
    2,
    (0, 4),
)  # so many steps, in this range, are stochastic and trained; the others are the ODE's
NOISE_LEVEL = 1.0
MINI_BATCHES = 2  # updates of one rollout
LEARNING_RATE = 2e-3
CLIP_RATIO = 1e-3  # must hold the mismatch of the bf16 rollout, about 1e-4 here, or noise decides what is trained
BAND = "0.97_1.03"  # far outside of both: only a broken step is rejected

Text = tuple[Tensor, Tensor]  # what the text encoders say: embeddings [b, L, E], pooled [b, E']


class Rollout(NamedTuple):
    """steps [T] of the schedule were stochastic: states [B, T+1, C, h, w], log_probs [B, T]; final
    [B, C, h, w].
    """

    steps: list[int]
    states: Tensor
    log_probs: Tensor
    final: Tensor


# --- the policy: a denoising step is a Gaussian


def gaussian_step(
    network: Any, x: Tensor, index: int, sigmas: Tensor, text: Text, noise_level: float
) -> Transition:
    """Step `index` of the schedule from x [b, C, h, w]. Rollout and training both call this
    function.

    The network predicts a velocity, of which the SDE makes mean and standard deviation. Without
    noise it is the ODE.
    """
    sigma, following = sigmas[index].expand(len(x)), sigmas[index + 1].expand(len(x))
    velocity = network(
        hidden_states=x.to(network.dtype),
        timestep=1000 * sigma,
        encoder_hidden_states=text[0].to(network.dtype),
        pooled_projections=text[1].to(network.dtype),
        return_dict=False,
    )[0].float()
    return transition(
        x, velocity, sigma, following, kind="sde", noise_level=noise_level, sigma_max=sigmas[1]
    )


@torch.no_grad()
def roll_out(
    sampler: Any, sigmas: Tensor, text: Text, shape: Sequence[int], seed: int, steps: list[int]
) -> Rollout:
    """One image for each row of `text`, with states and log-probs of the stochastic `steps`, which
    are consecutive.
    """
    seeds = [derive_seed(seed, row) for row in range(len(text[0]))]
    x, states, log_probs = normal(shape, seeds, "latents"), [], []
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
    return Rollout(
        steps,
        torch.stack(states, 1),
        torch.stack(log_probs, 1) if steps else x.new_zeros(len(x), 0),
        x,
    )


def step_log_prob(
    network: Any, data: Rollout, rows: Tensor, t: int, sigmas: Tensor, text: Text
) -> Tensor:
    """log p(state t+1 | state t) of recorded trajectories, [b, 1], under `network`;
    differentiable.
    """
    own = (text[0][rows], text[1][rows])
    step = gaussian_step(network, data.states[rows, t], data.steps[t], sigmas, own, NOISE_LEVEL)
    return log_prob(step, data.states[rows, t + 1]).unsqueeze(1)


# --- the reward


def blueness(images: Tensor) -> Tensor:
    """The reward [B] of images [B, 3, H, W] in 0 to 1: blue over the mean of the others. Yours goes
    here.
    """
    red, green, blue = images.mean((2, 3)).unbind(1)
    return blue - (red + green) / 2


@torch.no_grad()
def decode(pipe: Any, latents: Tensor) -> Tensor:
    config = pipe.vae.config
    images = pipe.vae.decode(
        latents / config.scaling_factor + config.shift_factor, return_dict=False
    )[0]
    return (images / 2 + 0.5).clamp(0, 1)


# --- the loss


class Targets(NamedTuple):
    """What log-probs are trained on, all [b, T].

    recorded: log-probs of the policy that sampled; old: of the one that the clip is about; weights,
        kept: correction.
    """

    recorded: Tensor
    old: Tensor
    advantages: Tensor
    weights: Tensor
    kept: Tensor

    def part(self, rows: Tensor, t: int) -> Targets:
        return Targets(*(values[rows, t : t + 1] for values in self))


def correct(training: Tensor, recorded: Tensor, rollout_is: str | None = None) -> CorrectionResult:
    """Weights (with `rollout_is`) and rejection for the ratio of what trains to what sampled;
    log-probs [b, T].
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
    """Bypass mode, without `recomputed`: two policies. The clip is about the rollout's own
    log-probs, and its ratio is the weight already.

    Decoupled mode: three policies. The clip is about the training graph's log-probs before the
    update, and weights and rejection, found once, correct for what the rollout's differ from them.
    """
    if recomputed is None:
        return Targets(
            recorded,
            recorded,
            advantages,
            torch.ones_like(recorded),
            torch.ones_like(recorded).bool(),
        )
    weights, kept, _ = correct(recomputed, recorded, rollout_is="token")
    return Targets(recorded, recomputed, advantages, weights, kept)


def policy_loss(log_probs: Tensor, targets: Targets, *, bypass: bool) -> tuple[Tensor, float]:
    """PPO's clipped loss of the current log-probs [b, T], and the share of steps that it clips.

    In bypass mode steps are rejected here, by the ratio of the current policy to the rollout's.
    """
    kept = correct(log_probs, targets.recorded).mask if bypass else targets.kept
    steps = ppo_clip(
        log_probs - targets.old, targets.advantages, kept, clip_low=CLIP_RATIO, clip_high=CLIP_RATIO
    )
    return (steps.values * targets.weights).mean(), steps.metrics.compute()["clip_fraction"]


# --- training


def load(seed: int) -> tuple[Any, Any, Text, Tensor]:
    """The bundled pipeline with a LoRA on its transformer, a bf16 copy of that, the encoded
    prompts, the sigmas.
    """
    pipe = StableDiffusion3Pipeline.from_pretrained(assets.path("tiny_glyph_sd3"))
    with torch.no_grad():
        embeds, _, pooled, _ = pipe.encode_prompt(
            PROMPTS, None, None, do_classifier_free_guidance=False, max_sequence_length=16
        )
    torch.manual_seed(seed)
    pipe.transformer.requires_grad_(False).eval()
    pipe.transformer.add_adapter(
        LoraConfig(
            r=16,
            lora_alpha=32,
            init_lora_weights="gaussian",
            target_modules=r".*attn\.to_(q|k|v|out\.0)",
        )
    )
    pipe.scheduler.set_timesteps(DENOISING_STEPS)
    sampler = copy.deepcopy(pipe.transformer).to(torch.bfloat16)
    return pipe, sampler, (embeds, pooled), pipe.scheduler.sigmas


def main(argv: Sequence[str] | None = None) -> tuple[float, float]:
    parser = argparse.ArgumentParser(description="FlowGRPO in one file")
    parser.add_argument("--mode", choices=["bypass", "decoupled"], default="bypass")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", default="blue.png", help="images before training (upper half) and after"
    )
    args = parser.parse_args(argv)
    bypass = args.mode == "bypass"

    pipe, sampler, prompts, sigmas = load(args.seed)
    trainer = pipe.transformer
    lora = {
        name: parameter for name, parameter in trainer.named_parameters() if parameter.requires_grad
    }
    optimizer = torch.optim.AdamW(lora.values(), lr=LEARNING_RATE)
    shape = (
        trainer.config.in_channels,
        HEIGHT // pipe.vae_scale_factor,
        WIDTH // pipe.vae_scale_factor,
    )
    group = torch.arange(len(PROMPTS)).repeat_interleave(GROUP)  # [B], the prompt of each image
    everyone, text = torch.arange(len(group)), (prompts[0][group], prompts[1][group])
    window = {
        "size": WINDOW,
        "first": WINDOW_RANGE[0],
        "last": WINDOW_RANGE[1],
        "sharing": "batch",
        "seed": args.seed,
    }

    def held_out() -> Tensor:
        """Images of the ODE in fp32, from noise that training never sees."""
        return decode(
            pipe, roll_out(trainer, sigmas, text, shape, derive_seed("held out"), []).final
        )

    before = held_out()
    for iteration in range(1, args.steps + 1):
        steps = draw_windows([0], 1, **window, step=iteration)[0].tolist()
        data = roll_out(sampler, sigmas, text, shape, derive_seed(args.seed, iteration), steps)
        rewards = blueness(decode(pipe, data.final))
        advantages = group_relative(
            rewards, group, torch.ones_like(group).bool(), global_std=True
        ).values
        advantages = (
            advantages.float().clamp(-5, 5).unsqueeze(1).expand(-1, WINDOW)
        )  # of an image, for all its steps
        with torch.no_grad():  # which bypass mode needs for nothing but the printed mismatch
            old = torch.cat(
                [step_log_prob(trainer, data, everyone, t, sigmas, text) for t in range(WINDOW)], 1
            )
        mismatch = (
            (old - data.log_probs).abs().mean()
        )  # before any update: same weights, other precision
        targets = make_targets(data.log_probs, None if bypass else old, advantages)
        for rows in everyone.chunk(MINI_BATCHES):
            for t in range(WINDOW):  # one step at a time: the memory of one forward
                log_probs = step_log_prob(trainer, data, rows, t, sigmas, text)
                loss, clipped = policy_loss(log_probs, targets.part(rows, t), bypass=bypass)
                (loss / WINDOW).backward()
            torch.nn.utils.clip_grad_norm_(lora.values(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        sampler.load_state_dict(
            {name: value.detach() for name, value in lora.items()}, strict=False
        )
        print(
            f"step {iteration:2}  reward {rewards.mean():+.3f}  mismatch {mismatch:.1e}  last "
            f"clipped {clipped:.2f}"
        )
    after = held_out()
    scores = blueness(before).mean().item(), blueness(after).mean().item()
    print(
        f"reward of {len(after)} held-out images: {scores[0]:+.3f} before, {scores[1]:+.3f} after"
    )
    shown = torch.cat([before[::2], after[::2]]).permute(0, 2, 3, 1).numpy()
    make_image_grid(pipe.image_processor.numpy_to_pil(shown), rows=len(shown) // 8, cols=8).save(
        args.out
    )
    return scores


if __name__ == "__main__":
    main()
