"""The update: a batch of trajectories -> optimizer steps on the LoRA."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from diffusers.training_utils import EMAModel
from torch import Tensor, nn

from flowgrpo_rc.batch import Batch
from flowgrpo_rc.core.metrics import MetricBag
from flowgrpo_rc.core.reduce import select
from flowgrpo_rc.core.transition import GaussianSteps
from flowgrpo_rc.correction.auto_bands import AutoBands
from flowgrpo_rc.distributed.processes import Processes
from flowgrpo_rc.losses.base import LossTerms, denominator
from flowgrpo_rc.models.lora import lora_parameters, reference_policy
from flowgrpo_rc.monitoring.decisions import Decisions
from flowgrpo_rc.monitoring.mismatch import MismatchMonitor
from flowgrpo_rc.policies.base import Evaluation, Measured, Policy, join
from flowgrpo_rc.training.config import ActorConfig
from flowgrpo_rc.training.old_policy import OldPolicy
from flowgrpo_rc.training.optim import (
    load_optimizer,
    load_schedule,
    make_optimizer,
    make_schedule,
    optimizer_tensors,
    schedule_state,
)


class NonFiniteGradient(RuntimeError):
    """Too many updates in a row had a gradient that is not finite."""


# (log-probs [b, t], batch, Gaussians of the steps or None) -> the terms of the loss.
Loss = Callable[[Tensor, Any, Any], LossTerms]


class PolicyUpdate:
    """Owns the optimizer, the learning-rate schedule and the average of the LoRA of
    `policy.network`.

    floor: is told what every loss is computed of.
    whole_windows: the loss sees all steps of a sample at once (bypass mode with
        `bypass_level=window`).
    auto_bands: judge each sample by them once, before the first update (bypass mode; in decoupled
    mode the batch comes judged).
    old_policy: of batches that come without one (decoupled mode).
    observations: is told what the loss decides (bypass mode).
    """

    def __init__(
        self,
        policy: Policy[Any, Any],
        config: ActorConfig,
        loss: Loss,
        processes: Processes,
        *,
        total_updates: int,
        floor: MismatchMonitor | None = None,
        whole_windows: bool = False,
        auto_bands: AutoBands | None = None,
        old_policy: OldPolicy | None = None,
        observations: Decisions | None = None,
    ) -> None:
        self._policy, self._config, self._loss, self._processes = policy, config, loss, processes
        self._old_policy, self._observations = old_policy, observations
        self._named = lora_parameters(policy.network)
        self._parameters = list(self._named.values())
        self._optimizer = make_optimizer(self._parameters, config.optim)
        self._schedule = make_schedule(self._optimizer, config.optim, total_updates)
        self.ema = EMAModel(self._parameters, decay=config.ema.decay) if config.ema.enable else None
        self._floor, self._whole_windows, self._auto_bands = floor, whole_windows, auto_bands
        self._updates = 0
        self._updated = False
        self._nonfinite_updates = 0
        self._nonfinite_in_a_row = 0

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        return self._parameters

    def lora_state(self) -> dict[str, Tensor]:
        """The LoRA tensors by name (detached views)."""
        return {name: parameter.detach() for name, parameter in self._named.items()}

    def run(self, batch: Batch, samples_per_mini_batch: int) -> MetricBag:
        """All optimizer steps on this process's part of a global batch, in mini-batches of
        consecutive samples.
        """
        bag, self._updated = MetricBag(), False
        minis = [
            batch.rows(start, start + samples_per_mini_batch)
            for start in range(0, len(batch), samples_per_mini_batch)
        ]
        if self._auto_bands is not None:
            # The first mini-batch is judged by its own forwards, unless it comes again.
            own = 1 if self._config.ppo_epochs == 1 else 0
            minis[own:] = [self._judged(mini, bag) for mini in minis[own:]]
        if batch.old_log_probs is None and self._old_policy is not None:
            # The first mini-batch's own forwards are its old policy.
            minis[1:] = [self._old_policy.recompute(mini) for mini in minis[1:]]
        for _ in range(self._config.ppo_epochs):
            for index, mini in enumerate(minis):
                minis[index] = self._mini_batch(mini, bag)
                self._updated = True
        if self._auto_bands is not None:
            self._auto_bands.finish(self._processes.gather)
        bag.max("nonfinite_updates", torch.tensor(float(self._nonfinite_updates)))
        return bag

    def _mini_batch(self, mini: Batch, bag: MetricBag) -> Batch:
        """Sum the gradients of the pieces, then divide by what the whole mini-batch of all
        processes counts.

        Returns it with its old policy, which these forwards were where it came without one.
        """
        size = self._config.ppo_micro_batch_size_per_gpu
        parts = torch.zeros(3, dtype=torch.float64, device=mini.group.device)
        rows = []
        for start in range(0, len(mini), size):
            micro, found = mini.rows(start, start + size), []
            whole = self._whole_windows and micro.num_steps > 1
            accumulate = self._accumulate_window if whole else self._accumulate
            for piece in [micro] if whole else self._policy.pieces(micro):
                counted, seen = accumulate(piece, bag)
                parts = parts + counted
                found.append(seen)
            rows.append(join(found, dim=1))
        if mini.old_log_probs is None and self._old_policy is not None:
            mini = self._old_policy.correct(mini, join(rows, dim=0))
        self._processes.sum_gradients(self._parameters)
        scale = 1 / denominator(parts, self._processes.sum)
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(scale)
        self._step(bag)
        return mini

    def _accumulate(self, piece: Batch, bag: MetricBag) -> tuple[Tensor, Measured]:
        """Backward of one forward; returns what the denominator follows from, and what the forward
        said.
        """
        now = self._policy.evaluate(piece)
        gaussian, keep_means = now.gaussian, False
        if piece.old_log_probs is None and self._old_policy is not None:
            keep_means = self._old_policy.keep_means
            piece, gaussian = self._old_policy.own(piece, now)
        piece = self._decide(piece, now, bag)
        terms = self._loss(now.log_probs, piece, gaussian)
        total = terms.total
        if self._config.use_kl_loss:
            total = total + self._penalty(now, piece, terms.share, bag)
        total.backward()
        self._report(terms, now.log_probs, gaussian, piece, bag)
        return terms.parts(), Measured.of(now, keep_means=keep_means)

    def _accumulate_window(self, micro: Batch, bag: MetricBag) -> tuple[Tensor, Measured]:
        """As `_accumulate`, with a loss of all steps of a sample and the memory of one.

        The log-probs are first measured without graphs. The slope of the loss at each of them is
        then handed on, by the chain rule, to a forward with a graph, one step after the other.
        """
        seen = self._policy.measure(micro, len(micro))
        micro = self._decide(micro, seen, bag)
        log_probs, gaussian = seen.log_probs.requires_grad_(), seen.gaussian
        kl = None if gaussian is None or gaussian.kl is None else gaussian.kl.requires_grad_()
        terms = self._loss(log_probs, micro, gaussian)
        terms.total.backward()
        start = 0
        for piece in self._policy.pieces(micro):
            now, here = self._policy.evaluate(piece), slice(start, start + piece.num_steps)
            total = (now.log_probs * _slope(log_probs)[:, here]).sum()
            if kl is not None and now.gaussian is not None and now.gaussian.kl is not None:
                total = total + (now.gaussian.kl * _slope(kl)[:, here]).sum()
            if self._config.use_kl_loss:
                total = total + self._penalty(now, piece, terms.share[:, here], bag)
            total.backward()
            start = here.stop
        self._report(terms, log_probs, gaussian, micro, bag)
        return terms.parts(), Measured.of(seen)

    def _penalty(self, now: Evaluation, piece: Batch, share: Tensor, bag: MetricBag) -> Tensor:
        """kl_loss_coef times the KL to the base model, for steps that count with `share` [b, t]."""
        counted = share > 0
        penalty = select(self._reference_divergence(now, piece), counted)
        bag.mean("kl_loss", penalty, counted)
        return self._config.kl_loss_coef * (penalty * share).sum()

    def _report(
        self,
        terms: LossTerms,
        log_probs: Tensor,
        gaussian: GaussianSteps | None,
        part: Batch,
        bag: MetricBag,
    ) -> None:
        bag.merge(terms.metrics)
        if self._floor is not None:
            self._floor.during(part, log_probs, terms.metrics, updated=self._updated)
        if self._observations is not None:
            kl, cells = None if gaussian is None else gaussian.kl, self._policy.cells(part)
            self._observations.add(
                part, log_probs, cells, terms.keep_mask, terms.weights, kl, updated=self._updated
            )

    @torch.no_grad()
    def _judged(self, mini: Batch, bag: MetricBag) -> Batch:
        """The mini-batch with the decisions of the `auto` bands, by forwards for nothing else."""
        rows, size = [], self._config.ppo_micro_batch_size_per_gpu
        for start in range(0, len(mini), size):
            micro = mini.rows(start, start + size)
            parts = [micro] if self._whole_windows else self._policy.pieces(micro)
            decided = [self._decide(part, self._policy.measure(part, size), bag) for part in parts]
            rows.append(torch.cat([part.rejection_mask for part in decided], 1))
        return mini.replace(rejection_mask=torch.cat(rows))

    def _decide(self, piece: Any, now: Evaluation, bag: MetricBag) -> Any:
        """The piece with the decision of the `auto` bands, if there are any and it has none yet."""
        if self._auto_bands is None or piece.rejection_mask is not None:
            return piece
        judged, metrics = self._auto_bands.judge(
            piece, now.log_probs, None if now.gaussian is None else now.gaussian.kl
        )
        bag.merge(metrics, "rollout_corr")
        return judged

    def _reference_divergence(self, now: Evaluation, piece: Batch) -> Tensor:
        with torch.no_grad(), reference_policy(self._policy.network):
            reference = self._policy.evaluate(piece)
        return self._policy.divergence(now, reference, piece)

    def _step(self, bag: MetricBag) -> None:
        norm = nn.utils.clip_grad_norm_(self._parameters, self._config.optim.clip_grad)
        value = norm.item()
        bag.max("lr", torch.tensor(float(self._schedule.get_last_lr()[0]), dtype=torch.float64))
        if math.isfinite(value):
            self._optimizer.step()
            self._schedule.step()
            self._updates += 1
            self._nonfinite_in_a_row = 0
            if self.ema is not None and self._updates % self._config.ema.update_interval == 0:
                self.ema.step(self._parameters)
        else:
            self._nonfinite_updates += 1
            self._nonfinite_in_a_row += 1
        self._optimizer.zero_grad(set_to_none=True)
        finite = torch.isfinite(norm)
        bag.mean("grad_norm", norm, finite)
        bag.mean("nonfinite_update_fraction", (~finite).double())
        if self._nonfinite_in_a_row >= self._config.optim.max_nonfinite_updates:
            raise NonFiniteGradient(
                f"the gradient was not finite in {self._nonfinite_in_a_row} updates in a row; "
                "lower actor.optim.lr or "
                "raise actor.optim.max_nonfinite_updates"
            )

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """What a checkpoint holds: `lora`, `optimizer` and, where there is one, `ema`."""
        tensors = {
            "lora": self.lora_state(),
            "optimizer": optimizer_tensors(self._optimizer, self._named),
        }
        if self.ema is not None:
            tensors["ema"] = dict(zip(self._named, self.ema.shadow_params, strict=True))
        return tensors

    def state(self) -> dict[str, Any]:
        """The numbers beside the tensors, JSON-able."""
        return {
            "updates": self._updates,
            "nonfinite_updates": self._nonfinite_updates,
            "nonfinite_in_a_row": self._nonfinite_in_a_row,
            "lr_schedule": schedule_state(self._schedule),
            "ema_step": 0 if self.ema is None else self.ema.optimization_step,
        }

    def load(self, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> None:
        """Go back to what `tensors` and `state` recorded, bit for bit."""
        for name, parameter in self._named.items():
            parameter.data.copy_(tensors["lora"][name])
        load_optimizer(self._optimizer, self._named, tensors["optimizer"])
        if self.ema is not None:
            for shadow, name in zip(self.ema.shadow_params, self._named, strict=True):
                shadow.copy_(tensors["ema"][name])
            self.ema.optimization_step = state["ema_step"]
        self._updates = state["updates"]
        self._nonfinite_updates = state["nonfinite_updates"]
        self._nonfinite_in_a_row = state["nonfinite_in_a_row"]
        load_schedule(self._schedule, state["lr_schedule"])


def _slope(leaf: Tensor) -> Tensor:
    """What a backward left at a tensor; 0 where the loss does not read it."""
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
