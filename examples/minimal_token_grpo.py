"""GRPO on a language model with rollout correction, the whole method in one file:
https://arxiv.org/abs/2402.03300.

    python examples/minimal_token_grpo.py
    python examples/minimal_token_grpo.py --mode bypass

A character-level model that adds but forgets the carry learns not to, in twenty seconds of one
core. Answers are sampled by a bf16 copy of the network and trained in fp32, so that the two
disagree a little about how likely each token
was. From top to bottom, as a training step goes:

    prompts -> rollout with log-probs -> rewards -> group advantages -> correction -> PPO clip ->
    optimizer step

minimal_flow_grpo.py is the same for images: a token is a step, and only what a step is differs.

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

PROMPTS, GROUP = 24, 8  # of a step; answers to a prompt are compared with each other
LENGTH = 5  # tokens of an answer: up to four digits and the end
MINI_BATCHES = 2  # updates of one rollout
LEARNING_RATE = 2e-3
CLIP_RATIO = 0.2  # far above the mismatch of a bf16 rollout, unlike that of a denoising step, whose log-prob is a mean
BAND = "0.5_2.0"  # a token whose ratio is outside is rejected


class Rollout(NamedTuple):
    """ids [B, L + T] of prompts and answers; log_probs [B, T]; mask [B, T], True up to and
    including the end token.
    """

    ids: Tensor
    log_probs: Tensor
    mask: Tensor


# --- the task


def sums(number: int, *seed: int | str) -> list[tuple[str, str]]:
    """Prompts and right answers: three digits each, so that all prompts are of one length and need
    no padding.
    """
    terms = torch.randint(100, 1000, (number, 2), generator=generator(*seed)).tolist()
    return [(f"{a}+{b}=", str(a + b)) for a, b in terms]


def exact_match(answers: Sequence[str], right: Sequence[str]) -> Tensor:
    """The reward [B]. Yours goes here."""
    return torch.tensor(
        [float(answer == target) for answer, target in zip(answers, right, strict=True)]
    )


def texts(tokenizer: Any, data: Rollout) -> list[str]:
    """The answers, without the end token."""
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
    """One answer to each of prompts [B, L]. Row i draws from numbers of its own; temperature 0
    takes the likeliest.
    """
    numbers = uniform((LENGTH,), [derive_seed(seed, row) for row in range(len(prompts))])
    ids, log_probs = prompts, []
    for t in range(LENGTH):
        logits = sampler(input_ids=ids).logits[:, -1]
        token = (
            sample_tokens(logits, numbers[:, t], temperature) if temperature else logits.argmax(-1)
        )
        log_probs.append(token_log_probs(logits, token, 1.0))
        ids = torch.cat([ids, token.unsqueeze(1)], 1)
    mask = until_end(ids[:, -LENGTH:], torch.tensor([end]))
    return Rollout(ids, torch.stack(log_probs, 1).masked_fill(~mask, 0.0), mask)


def answer_log_probs(network: Any, data: Rollout, rows: Tensor) -> Tensor:
    """log p of each token of the recorded answers, [b, T], 0 after the end, in one forward;
    differentiable.
    """
    logits = network(input_ids=data.ids[rows, :-1]).logits[:, -LENGTH:]
    return token_log_probs(logits, data.ids[rows, -LENGTH:], 1.0).masked_fill(~data.mask[rows], 0.0)


# --- the loss


class Targets(NamedTuple):
    """What log-probs are trained on, all [b, T]; mask: the tokens that exist.

    recorded: log-probs of the policy that sampled; old: of the one that the clip is about; weights,
        kept: correction.
    """

    mask: Tensor
    recorded: Tensor
    old: Tensor
    advantages: Tensor
    weights: Tensor
    kept: Tensor

    def part(self, rows: Tensor) -> Targets:
        return Targets(*(values[rows] for values in self))


def correct(
    training: Tensor, recorded: Tensor, mask: Tensor, rollout_is: str | None = None
) -> CorrectionResult:
    """Weights (with `rollout_is`) and rejection for the ratio of what trains to what sampled;
    log-probs [b, T].
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
    """Bypass mode, without `recomputed`: two policies. The clip is about the rollout's own
    log-probs, and its ratio is the weight already.

    Decoupled mode: three policies. The clip is about the training graph's log-probs before the
    update, and weights (truncated at 2) and rejection, found once, correct for what the rollout's
    differ from them.
    """
    if recomputed is None:
        return Targets(mask, recorded, recorded, advantages, torch.ones_like(recorded), mask)
    weights, kept, _ = correct(recomputed, recorded, mask, rollout_is="token")
    return Targets(mask, recorded, recomputed, advantages, weights, kept)


def policy_loss(log_probs: Tensor, targets: Targets, *, bypass: bool) -> Tensor:
    """PPO's clipped loss of the current log-probs [b, T], the mean over the tokens that are kept.

    In bypass mode tokens are rejected here, by the ratio of the current policy to the rollout's.
    """
    kept = correct(log_probs, targets.recorded, targets.mask).mask if bypass else targets.kept
    steps = ppo_clip(
        log_probs - targets.old, targets.advantages, kept, clip_low=CLIP_RATIO, clip_high=CLIP_RATIO
    )
    return masked_mean(steps.values * targets.weights, kept)


# --- training


def load(seed: int) -> tuple[Any, Any, Any]:
    """The bundled model with a LoRA, a bf16 copy of that, and the tokenizer."""
    path = assets.path("tiny_adder_lm")
    torch.manual_seed(seed)
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
    trainer = get_peft_model(AutoModelForCausalLM.from_pretrained(path), lora).eval()
    return trainer, copy.deepcopy(trainer).to(torch.bfloat16), AutoTokenizer.from_pretrained(path)


def main(argv: Sequence[str] | None = None) -> tuple[float, float]:
    parser = argparse.ArgumentParser(description="GRPO on a language model in one file")
    parser.add_argument("--mode", choices=["bypass", "decoupled"], default="decoupled")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    bypass = args.mode == "bypass"

    trainer, sampler, tokenizer = load(args.seed)
    lora = {
        name: parameter for name, parameter in trainer.named_parameters() if parameter.requires_grad
    }
    optimizer = torch.optim.AdamW(lora.values(), lr=LEARNING_RATE)
    group = torch.arange(PROMPTS).repeat_interleave(GROUP)  # [B], the prompt of each answer
    everyone = torch.arange(len(group))

    def encode(prompts: Sequence[str]) -> Tensor:
        return torch.tensor([tokenizer(prompt).input_ids for prompt in prompts])

    def held_out() -> float:
        """Exact match of the likeliest answers to sums of another seed."""
        prompts, right = zip(*sums(256, "held out"), strict=True)
        data = roll_out(trainer, encode(prompts), 0, tokenizer.eos_token_id, temperature=0.0)
        return exact_match(texts(tokenizer, data), right).mean().item()

    before = held_out()
    for iteration in range(1, args.steps + 1):
        asked = sums(PROMPTS, args.seed, iteration)
        prompts = encode([prompt for prompt, _ in asked])[group]
        data = roll_out(sampler, prompts, derive_seed(args.seed, iteration), tokenizer.eos_token_id)
        rewards = exact_match(texts(tokenizer, data), [asked[i][1] for i in group.tolist()])
        advantages = group_relative(rewards, group, torch.ones_like(group).bool()).values.float()
        with torch.no_grad():  # which bypass mode needs for nothing but the printed mismatch
            old = answer_log_probs(trainer, data, everyone)
        mismatch = masked_mean(
            (old - data.log_probs).abs(), data.mask
        )  # same weights, other precision
        targets = make_targets(
            data.mask,
            data.log_probs,
            None if bypass else old,
            advantages.unsqueeze(1).expand(-1, LENGTH),
        )
        for rows in everyone.chunk(MINI_BATCHES):
            loss = policy_loss(
                answer_log_probs(trainer, data, rows), targets.part(rows), bypass=bypass
            )
            loss.backward()
            torch.nn.utils.clip_grad_norm_(lora.values(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        sampler.load_state_dict(
            {name: value.detach() for name, value in lora.items()}, strict=False
        )
        print(f"step {iteration:2}  reward {rewards.mean():.3f}  mismatch {mismatch:.1e}")
    after = held_out()
    print(f"exact match of 256 held-out sums: {before:.3f} before, {after:.3f} after")
    return before, after


if __name__ == "__main__":
    main()
