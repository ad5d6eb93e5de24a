"""Log-probs, masks, settings, small batches, and processes made of threads."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from support.oracles import Clip, Expected, Rule, aggregate, correction, ppo
from torch import Tensor

from flowgrpo_rc.algorithms.policy_gradient.objective import Objective
from flowgrpo_rc.batch import (
    Batch,
    Conditioning,
    DiffusionBatch,
    SamplerSpec,
    TokenBatch,
    TokenSpec,
)
from flowgrpo_rc.core.metrics import MetricBag
from flowgrpo_rc.core.reduce import AllReduce, identity
from flowgrpo_rc.correction.config import RolloutCorrectionConfig
from flowgrpo_rc.correction.correct import Correction, Corrector
from flowgrpo_rc.losses.base import denominator
from flowgrpo_rc.losses.config import DiffusionLossConfig, LossConfig, TokenLossConfig

MASKS = {
    "full": [[1, 1, 1, 1]] * 6,
    "right": [[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1], [1, 1, 0, 0]],
    "left": [[1, 1, 1, 1], [0, 1, 1, 1], [0, 0, 1, 1], [0, 0, 0, 1], [1, 1, 1, 1], [0, 0, 1, 1]],
    "empty": [[1, 1, 1, 1], [0, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0], [0, 1, 1, 1]],
    "holes": [[1, 0, 1, 1], [0, 1, 0, 1], [1, 0, 0, 1], [1, 1, 0, 1], [0, 1, 1, 0], [1, 0, 1, 0]],
}
# Training and rollout log-prob of a step that cannot be judged.
NOT_FINITE = [
    (math.nan, 0.0),
    (0.0, math.nan),
    (math.inf, 0.0),
    (-math.inf, 0.0),
    (0.0, -math.inf),
    (-math.inf, -math.inf),
    (math.inf, math.inf),
]
BOUNDS = {"truncate": (0.0, 1.3), "clip": (0.8, 1.3), "mask": (0.8, 1.3), "icepop": (0.8, 1.3)}


def log_probs(
    scale: float = 0.5, seed: int = 0, shape: tuple[int, int] = (6, 4)
) -> tuple[Tensor, Tensor]:
    """Draws training and rollout log-probs, float64."""
    source = torch.Generator().manual_seed(seed)
    rollout = torch.randn(shape, generator=source, dtype=torch.float64)
    return rollout + scale * torch.randn(shape, generator=source, dtype=torch.float64), rollout


def drawn_log_probs(scale: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draws log-probs of rollout, old and current policy, and advantages, [6, 4] float64."""
    old, rollout = log_probs(scale)
    now = old + scale * torch.randn(
        6, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64
    )
    advantages = torch.linspace(-2, 2, 6, dtype=torch.float64).unsqueeze(1).expand(-1, 4)
    return rollout, old, now, advantages


def tensor(rows: list[Any]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def mask_of(name: str) -> Tensor:
    return torch.tensor(MASKS[name], dtype=torch.bool)


def settings(rule: Rule) -> dict[str, Any]:
    """The rule as a user writes it."""
    written: dict[str, Any] = {
        "rollout_rs": [name for name, _, _ in rule.bands] or None,
        "rollout_rs_threshold": [
            f"{low!r}_{high!r}" if name.endswith("k1") else high for name, low, high in rule.bands
        ]
        or None,
        "rollout_token_veto_threshold": rule.veto,
        "normalize": "kept" if rule.over_kept else None,
    }
    if rule.level is not None:
        written |= {
            "rollout_is": rule.level,
            "rollout_is_mode": rule.mode,
            "rollout_is_threshold": rule.upper
            if rule.mode == "truncate"
            else f"{rule.lower!r}_{rule.upper!r}",
            "rollout_is_batch_normalize": rule.normalise,
        }
    return written


def run(
    training: Tensor, rollout: Tensor, mask: Tensor, rule: Rule, **options: AllReduce
) -> Correction:
    config = RolloutCorrectionConfig(**settings(rule))
    config.validate()
    return Corrector(config)(training, rollout, mask, **options)


def expected(training: Tensor, rollout: Tensor, mask: Tensor, rule: Rule) -> Expected:
    return correction(training.tolist(), rollout.tolist(), mask.tolist(), rule)


def columns(num_samples: int) -> dict[str, Tensor]:
    index = torch.arange(num_samples)
    return {
        "group": index // 2,
        "seed": index,
        "policy_version": torch.zeros(num_samples, dtype=torch.int64),
    }


def diffusion_batch(
    rollout_log_probs: Tensor | None, *, shape: tuple[int, int] | None = None, **fields: Any
) -> DiffusionBatch:
    """Makes a batch [B, T] with the given log-probs; everything else is small and constant."""
    num_samples, num_steps = rollout_log_probs.shape if rollout_log_probs is not None else shape
    spec = SamplerSpec(
        height=8,
        width=8,
        num_inference_steps=num_steps + 1,
        guidance_scale=1.0,
        noise_level=0.7,
        sde_type="sde",
        log_prob_convention="gaussian",
        max_sequence_length=4,
        dtype="fp32",
    )
    return DiffusionBatch(
        **columns(num_samples),
        spec=spec,
        all_latents=torch.zeros(num_samples, num_steps + 1, 2),
        all_timesteps=torch.zeros(num_samples, num_steps),
        step_indices=torch.arange(num_steps).expand(num_samples, -1),
        sigmas=torch.linspace(1, 0, num_steps + 2),
        conditioning=Conditioning(embeds=torch.zeros(1, 1, 1)),
        prompt_index=torch.zeros(num_samples, dtype=torch.int64),
        rollout_log_probs=rollout_log_probs,
        **fields,
    )


def token_batch(rollout_log_probs: Tensor, response_mask: Tensor, **fields: Any) -> TokenBatch:
    num_samples, num_tokens = response_mask.shape
    spec = TokenSpec(dtype="fp32", temperature=1.0, prompt_length=2, response_length=num_tokens)
    return TokenBatch(
        **columns(num_samples),
        spec=spec,
        prompt_ids=torch.zeros(num_samples, 2, dtype=torch.int64),
        prompt_mask=torch.ones(num_samples, 2, dtype=torch.bool),
        response_ids=torch.zeros(num_samples, num_tokens, dtype=torch.int64),
        response_mask=response_mask,
        rollout_log_probs=rollout_log_probs,
        **fields,
    )


def loss_config(
    correction: RolloutCorrectionConfig, *, clip: float = 0.1, adv_clip: float = 5.0, **token: Any
) -> LossConfig:
    return LossConfig(
        rollout_correction=correction,
        diffusion_loss=DiffusionLossConfig(clip_ratio=clip, adv_clip_max=adv_clip),
        token_loss=TokenLossConfig(**token),
    )


def reference_loss(
    config: LossConfig,
    rule: Rule,
    rollout: Tensor,
    old: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip: Clip,
    aggregation: str,
    counts_kept: bool,
) -> Callable[[Tensor], Tensor]:
    """Computes the loss of the documents from current log-probs; the correction carries no
    gradient.
    """
    correction_settings = config.rollout_correction
    bypass = correction_settings.bypass_mode
    reinforces = correction_settings.loss_type == "reinforce"

    def total(now: Tensor) -> Tensor:
        found = expected(now.detach() if bypass else old, rollout, mask, rule)
        values = (
            -advantages * now
            if reinforces
            else ppo(now, rollout if bypass else old, advantages, clip)
        )
        if found.weights is not None and (reinforces or not bypass):
            values = values * torch.tensor(found.weights, dtype=now.dtype)
        return aggregate(
            values, found.kept, found.kept if counts_kept else mask.tolist(), aggregation
        )

    return total


def gradient_of(total: Callable[[Tensor], Tensor], log_probs: Tensor) -> tuple[float, Tensor]:
    leaf = log_probs.detach().clone().requires_grad_()
    loss = total(leaf)
    assert loss.ndim == 0
    loss.backward()
    return loss.item(), leaf.grad


def assert_same(found: tuple[float, Tensor], expect: tuple[float, Tensor]) -> None:
    """Both have the same loss and the same gradient, which is not zero."""
    assert abs(found[0] - expect[0]) < 1e-12, (found[0], expect[0])
    torch.testing.assert_close(found[1], expect[1], rtol=1e-11, atol=1e-13)
    assert found[1].abs().max() > 0


def summed(
    objective: Objective[Any],
    now: Tensor,
    batches: Sequence[Batch],
    *,
    by_step: bool = False,
    reduce: Mapping[str, AllReduce] | None = None,
) -> tuple[float, Tensor, MetricBag]:
    """Sums as the update does: gradients of the totals, then one division by the denominator.

    With `by_step` each SDE step of each micro-batch is a sum of its own.
    """
    leaf = now.detach().clone().requires_grad_()
    bag = MetricBag()
    total = torch.zeros((), dtype=torch.float64)
    counts = torch.zeros(3, dtype=torch.float64)
    start = 0
    for batch in batches:
        rows = slice(start, start + len(batch))
        start = rows.stop
        cuts = [slice(t, t + 1) for t in range(batch.num_steps)] if by_step else [slice(None)]
        for steps in cuts:
            piece = batch.step(steps.start) if by_step else batch
            terms = objective.terms(leaf[rows, steps], piece)
            terms.total.backward()
            total = total + terms.total.detach()
            counts = counts + terms.counts
            bag.merge(terms.metrics)
    add = identity if reduce is None else reduce["sum"]
    scale = denominator(counts, add)
    assert leaf.grad is not None
    return (add(total) / scale).item(), leaf.grad / scale, bag


def drop_odd(training: Tensor, rollout: Tensor, mask: Tensor, config: Any) -> tuple[Tensor, Tensor]:
    """A `custom_correction`: weights are 3, and every other row is rejected."""
    kept = mask & (torch.arange(len(mask)) % 2 == 0).unsqueeze(1)
    return torch.full_like(training, 3.0), kept


def only_a_mask(
    training: Tensor, rollout: Tensor, mask: Tensor, config: Any
) -> tuple[None, Tensor]:
    return None, drop_odd(training, rollout, mask, config)[1]


def pieces(batch: Batch, cuts: list[int]) -> list[Batch]:
    return [
        batch.rows(start, stop) for start, stop in zip([0, *cuts], [*cuts, len(batch)], strict=True)
    ]


def on_shards(count: int, work: Callable[[int, Mapping[str, AllReduce]], Any]) -> list[Any]:
    """Runs work(rank, reduce) on `count` threads. reduce["sum"], ["max"] and ["gather"] really
    combine across them.
    """
    barrier = threading.Barrier(count, timeout=20)
    posted: list[Tensor] = [torch.empty(0)] * count
    results: list[Any] = [None] * count
    errors: list[BaseException] = []

    def reducer(rank: int, combine: AllReduce) -> AllReduce:
        def reduce(value: Tensor) -> Tensor:
            posted[rank] = value
            barrier.wait()
            together = combine(torch.stack(posted))
            barrier.wait()
            return together

        return reduce

    def start(rank: int) -> None:
        combine = {
            "sum": lambda x: x.sum(0),
            "max": lambda x: x.amax(0),
            "gather": lambda x: x.flatten(0, 1),
        }
        reduce = {name: reducer(rank, function) for name, function in combine.items()}
        try:
            results[rank] = work(rank, reduce)
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=start, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def rule_of(level: str, mode: str, **others) -> Rule:
    lower, upper = BOUNDS[mode]
    return Rule(level, mode, lower, upper, **others)


def assert_same_correction(found: Correction, other: Correction) -> None:
    assert torch.equal(found.mask, other.mask)
    torch.testing.assert_close(found.weights, other.weights, rtol=1e-14, atol=0)
    assert found.metrics.compute() == pytest.approx(other.metrics.compute(), rel=1e-12, abs=1e-12)
