"""GRPO on a language model with rollout correction, the whole method in one file.

    python examples/minimal_token_grpo.py
    python examples/minimal_token_grpo.py --mode bypass

A character-level model that adds but forgets the carry learns to add with it, in twenty seconds on
one core. Answers are sampled by a bf16 copy of the network and trained in fp32. So the two disagree
a little about the probability of each token, and that is corrected. From top to bottom, in the
order of a training step:

    prompts -> rollout with log-probs -> rewards -> group advantages -> correction -> PPO clip ->
    optimizer step

minimal_flow_grpo.py is the same for images. Here a token is a step.

GRPO: https://arxiv.org/abs/2402.03300.

Legend: P prompts, G answers to each, B = P G; L tokens of a prompt, T of an answer; b rows of a
mini-batch.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from flowgrpo_rc import assets
from flowgrpo_rc.core.advantages import group_relative
from flowgrpo_rc.core.random import derive_seed, generator, uniform
from flowgrpo_rc.core.reduce import masked_mean
from flowgrpo_rc.core.tokens import sample_tokens, token_log_probs, until_end
from flowgrpo_rc.correction.api import (
    CorrectionResult,
    compute_rollout_correction_and_rejection_mask,
)
from flowgrpo_rc.losses.ppo_clip import ppo_clip

PROMPTS = 24  # of a training step
GROUP = 8  # answers to a prompt, which are compared with each other
LENGTH = 5  # tokens of an answer: up to four digits and the end
MINI_BATCHES = 2  # updates for one rollout
LEARNING_RATE = 2e-3
# Far above the mismatch of a bf16 rollout. That of a denoising step, whose log-prob is a mean, is
# much smaller, and so is its clip.
CLIP_RATIO = 0.2
BAND = "0.5_2.0"  # a token whose ratio is outside is rejected


class Rollout(NamedTuple):
    """Prompts with sampled answers.

    Attributes:
      ids: tokens of prompts and answers, [B, L + T].
      log_probs: of the answers under the policy that sampled, [B, T].
      mask: [B, T]; True up to and including the end token.
    """

    ids: Tensor
    log_probs: Tensor
    mask: Tensor


# --- the task


def sums(number: int, *seed: int | str) -> list[tuple[str, str]]:
    """Draws prompts and right answers.

    Operands have three digits each, so all prompts have one length and need no padding.
    """
    terms = torch.randint(100, 1000, (number, 2), generator=generator(*seed)).tolist()
    return [(f"{a}+{b}=", str(a + b)) for a, b in terms]


def exact_match(answers: Sequence[str], right: Sequence[str]) -> Tensor:
    """Computes the reward [B] of answers. Yours goes here."""
    pairs = zip(answers, right, strict=True)
    return torch.tensor([float(answer == target) for answer, target in pairs])


def texts(tokenizer: Any, data: Rollout) -> list[str]:
    """Turns answers into texts, without the end token."""
    answers = data.ids[:, -LENGTH:]
    return [
        tokenizer.decode(row[kept & (row != tokenizer.eos_token_id)])
        for row, kept in zip(answers, data.mask, strict=True)
    ]


# --- the policy: a step is a token


@torch.no_grad()
def roll_out(
    sampler: Any, prompts: Tensor, seed: int, end: int, temperature: float = 1.0
) -> Rollout:
    """Samples one answer to each of prompts [B, L]. Each row draws from random numbers of its own.

    Temperature 0 takes the likeliest tokens.
    """
    numbers = uniform((LENGTH,), [derive_seed(seed, row) for row in range(len(prompts))])
    ids = prompts
    log_probs = []
    for t in range(LENGTH):
        logits = sampler(input_ids=ids).logits[:, -1]
        if temperature:
            token = sample_tokens(logits, numbers[:, t], temperature)
        else:
            token = logits.argmax(-1)
        log_probs.append(token_log_probs(logits, token, 1.0))
        ids = torch.cat([ids, token.unsqueeze(1)], 1)
    mask = until_end(ids[:, -LENGTH:], torch.tensor([end]))
    return Rollout(ids, torch.stack(log_probs, 1).masked_fill(~mask, 0.0), mask)


def answer_log_probs(network: Any, data: Rollout, rows: Tensor) -> Tensor:
    """Computes log p of each token of recorded answers in one forward, [b, T], 0 after the end."""
    logits = network(input_ids=data.ids[rows, :-1]).logits[:, -LENGTH:]
    return token_log_probs(logits, data.ids[rows, -LENGTH:], 1.0).masked_fill(~data.mask[rows], 0.0)


# --- the loss


class Targets(NamedTuple):
    """The numbers that log-probs are trained on, all [b, T].

    Attributes:
      mask: True for the tokens that exist.
      recorded: log-probs of the policy that sampled.
      old: log-probs of the policy that the clip is about.
      advantages: advantage of the answer that each token belongs to.
      weights: correction weights.
      kept: False for rejected tokens.
    """

    mask: Tensor
    recorded: Tensor
    old: Tensor
    advantages: Tensor
    weights: Tensor
    kept: Tensor

    def part(self, rows: Tensor) -> Targets:
        """Returns some of the rows."""
        return Targets(*(values[rows] for values in self))


def correct(
    training: Tensor, recorded: Tensor, mask: Tensor, rollout_is: str | None = None
) -> CorrectionResult:
    """Computes weights (with `rollout_is`) and rejection from the ratio of two policies.

    The ratio is that of the policy that trains to the one that sampled; log-probs [b, T].
    """
    return compute_rollout_correction_and_rejection_mask(
        training.detach(),
        recorded,
        mask,
        rollout_is=rollout_is,
        rollout_is_threshold=2.0,
        rollout_rs="token_k1",
        rollout_rs_threshold=BAND,
    )


def make_targets(
    mask: Tensor, recorded: Tensor, recomputed: Tensor | None, advantages: Tensor
) -> Targets:
    """Chooses the policy that the clip is about, and corrects for the difference to it.

    Bypass mode, without `recomputed`, has two policies. The clip is about the rollout's own
    log-probs, so the ratio in the loss is already the weight.

    Decoupled mode has three policies. The clip is about the log-probs of the training graph before
    the update. Weights (at most 2) and rejection, found once, correct for the difference of the
    rollout to it.
    """
    if recomputed is None:
        return Targets(mask, recorded, recorded, advantages, torch.ones_like(recorded), mask)
    weights, kept, _ = correct(recomputed, recorded, mask, rollout_is="token")
    return Targets(mask, recorded, recomputed, advantages, weights, kept)


def policy_loss(log_probs: Tensor, targets: Targets, *, bypass: bool) -> Tensor:
    """Computes PPO's clipped loss of the current log-probs [b, T], a mean over the kept tokens.

    In bypass mode tokens are rejected here, by the ratio of the current policy to the rollout's.
    """
    kept = correct(log_probs, targets.recorded, targets.mask).mask if bypass else targets.kept
    steps = ppo_clip(
        log_probs - targets.old, targets.advantages, kept, clip_low=CLIP_RATIO, clip_high=CLIP_RATIO
    )
    return masked_mean(steps.values * targets.weights, kept)


# --- training


class Setup(NamedTuple):
    """Everything that a training step needs."""

    trainer: Any  # the bundled model with a LoRA, which is trained
    sampler: Any  # a bf16 copy of it, which samples
    tokenizer: Any
    lora: dict[str, Tensor]  # the trained parameters by name
    optimizer: torch.optim.Optimizer

    def encode(self, prompts: Sequence[str]) -> Tensor:
        """Turns prompts of one length into tokens [B, L]."""
        return torch.tensor([self.tokenizer(prompt).input_ids for prompt in prompts])


def load(seed: int) -> Setup:
    """Loads the bundled model, and puts a LoRA on it."""
    path = assets.path("tiny_adder_lm")
    torch.manual_seed(seed)
    config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
    trainer = get_peft_model(AutoModelForCausalLM.from_pretrained(path), config).eval()
    sampler = copy.deepcopy(trainer).to(torch.bfloat16)
    lora = {name: tensor for name, tensor in trainer.named_parameters() if tensor.requires_grad}
    optimizer = torch.optim.AdamW(lora.values(), lr=LEARNING_RATE)
    return Setup(trainer, sampler, AutoTokenizer.from_pretrained(path), lora, optimizer)


def held_out(setup: Setup) -> float:
    """Measures the exact match of the likeliest answers to sums of another seed."""
    prompts, right = zip(*sums(256, "held out"), strict=True)
    end = setup.tokenizer.eos_token_id
    data = roll_out(setup.trainer, setup.encode(prompts), 0, end, temperature=0.0)
    return exact_match(texts(setup.tokenizer, data), right).mean().item()


def train_step(setup: Setup, iteration: int, seed: int, *, bypass: bool) -> str:
    """Takes one training step and returns a line about it."""
    trainer, sampler, tokenizer, lora, optimizer = setup
    group = torch.arange(PROMPTS).repeat_interleave(GROUP)  # [B], the prompt of each answer
    everyone = torch.arange(len(group))

    asked = sums(PROMPTS, seed, iteration)
    prompts = setup.encode([prompt for prompt, _ in asked])[group]
    data = roll_out(sampler, prompts, derive_seed(seed, iteration), tokenizer.eos_token_id)
    rewards = exact_match(texts(tokenizer, data), [asked[i][1] for i in group.tolist()])
    advantages = group_relative(rewards, group, torch.ones_like(group).bool()).values.float()
    # All tokens of an answer have its advantage.
    advantages = advantages.unsqueeze(1).expand(-1, LENGTH)
    # Bypass mode needs these log-probs for nothing but the printed mismatch.
    with torch.no_grad():
        old = answer_log_probs(trainer, data, everyone)
    # Before any update the weights are the same, so this is the difference of the precisions.
    mismatch = masked_mean((old - data.log_probs).abs(), data.mask)

    targets = make_targets(data.mask, data.log_probs, None if bypass else old, advantages)
    for rows in everyone.chunk(MINI_BATCHES):
        log_probs = answer_log_probs(trainer, data, rows)
        policy_loss(log_probs, targets.part(rows), bypass=bypass).backward()
        torch.nn.utils.clip_grad_norm_(lora.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    sampler.load_state_dict({name: tensor.detach() for name, tensor in lora.items()}, strict=False)
    return f"reward {rewards.mean():.3f}  mismatch {mismatch:.1e}"


def main(argv: Sequence[str] | None = None) -> tuple[float, float]:
    """Trains, and returns the exact match of held-out sums before and after."""
    parser = argparse.ArgumentParser(description="GRPO on a language model in one file")
    parser.add_argument("--mode", choices=["bypass", "decoupled"], default="decoupled")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)

    setup = load(args.seed)
    before = held_out(setup)
    for iteration in range(1, args.steps + 1):
        line = train_step(setup, iteration, args.seed, bypass=args.mode == "bypass")
        print(f"step {iteration:2}  {line}")
    after = held_out(setup)
    print(f"exact match of 256 held-out sums: {before:.3f} before, {after:.3f} after")
    return before, after


if __name__ == "__main__":
    main()
