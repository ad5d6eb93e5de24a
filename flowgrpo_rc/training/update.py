"""The update: a batch of trajectories becomes optimizer steps on the LoRA.

Legend: b rows of a micro-batch, t steps that one forward evaluates or one loss sees.
"""

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
from flowgrpo_rc.distributed.processes import Processes
from flowgrpo_rc.losses.base import LossTerms, denominator
from flowgrpo_rc.models.lora import lora_parameters, reference_policy
from flowgrpo_rc.policies.base import Evaluation, Measured, Policy, join
from flowgrpo_rc.records.checkpoint import check_tensors, not_finite
from flowgrpo_rc.records.optimizer_state import (
    load_optimizer,
    load_schedule,
    optimizer_tensors,
    schedule_state,
)
from flowgrpo_rc.training.config import ActorConfig
from flowgrpo_rc.training.modes import Mode, Seen
from flowgrpo_rc.training.optim import make_optimizer, make_schedule


class NonFiniteGradient(FloatingPointError):
    """Says that too many updates in a row had a gradient that is not finite."""


class NonFiniteWeights(FloatingPointError):
    """Says that an update has left weights, moments or averages that are not finite."""


# So many updates in a row without a finite gradient end the run; each is skipped.
MOST_NONFINITE = 5
# (log-probs [b, t], batch, Gaussians of the steps or None) -> the terms of the loss.
Loss = Callable[[Tensor, Any, Any], LossTerms]


class PolicyUpdate:
    """Trains the LoRA of `policy.network`; owns the optimizer, its schedule and the average."""

    def __init__(
        self,
        policy: Policy[Any, Any],
        config: ActorConfig,
        loss: Loss,
        processes: Processes,
        mode: Mode,
        *,
        total_updates: int,
    ) -> None:
        """Makes the optimizer.

        Args:
          policy: the training graph.
          config: settings of the update.
          loss: computes the terms of the loss for log-probs [b, t], a batch and Gaussians or None.
          processes: the processes of the run.
          mode: fills in the old policy and notes what the losses were computed from.
          total_updates: optimizer updates of the whole run, for the learning-rate schedule.
        """
        self._policy = policy
        self._config = config
        self._loss = loss
        self._processes = processes
        self._mode = mode
        self._named = lora_parameters(policy.network)
        self._parameters = list(self._named.values())
        self._optimizer = make_optimizer(self._parameters, config.optim)
        self._schedule = make_schedule(self._optimizer, config.optim, total_updates)
        self.ema: EMAModel | None = None
        if config.ema.enable:
            self.ema = EMAModel(self._parameters, decay=config.ema.decay)
        self._updates = 0
        self._updates_here = 0
        self._nonfinite_updates = 0
        self._nonfinite_in_a_row = 0

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """The LoRA tensors that are trained."""
        return self._parameters

    def lora_state(self) -> dict[str, Tensor]:
        """Returns the LoRA tensors by name (detached views)."""
        return {name: parameter.detach() for name, parameter in self._named.items()}

    def run(self, batch: Batch, samples_per_mini_batch: int) -> MetricBag:
        """Takes all optimizer steps of an iteration.

        Args:
          batch: this process's part of the global batch.
          samples_per_mini_batch: how many consecutive samples make a mini-batch here.

        Returns:
          The metrics, names without prefix.
        """
        metrics = MetricBag()
        self._updates_here = 0
        minis = self._mode.before_update(batch.split(samples_per_mini_batch))
        for _ in range(self._config.ppo_epochs):
            for index, mini in enumerate(minis):
                minis[index] = self._mini_batch(mini, metrics)
                self._updates_here += 1
        metrics.max("nonfinite_updates", torch.tensor(float(self._nonfinite_updates)))
        return metrics

    def _mini_batch(self, mini: Batch, metrics: MetricBag) -> Batch:
        """Takes one optimizer step; returns the mini-batch with its old policy.

        The gradient is that of one loss over the mini-batch of all processes, however it is cut
        into micro-batches.
        """
        size = self._config.ppo_micro_batch_size_per_gpu
        parts = torch.zeros(3, dtype=torch.float64, device=mini.group.device)
        measured_rows = []
        decided_rows = []
        for start in range(0, len(mini), size):
            micro = mini.rows(start, start + size)
            pieces = list(self._policy.pieces(micro))
            if self._mode.whole_windows and len(pieces) > 1:
                micro_parts, decision = self._accumulate_window(micro, metrics)
                parts = parts + micro_parts
                decided_rows.append(decision)
                continue
            found = [self._accumulate(piece, metrics) for piece in pieces]
            parts = parts + sum(piece_parts for piece_parts, _, _ in found)
            measured_rows.append(join([measured for _, measured, _ in found], dim=1))
            decided_rows.append(join([decision for _, _, decision in found], dim=1))
        if mini.old_log_probs is None:
            # No update came before these forwards, so they are those of the old policy.
            mini = self._mode.leave(mini, join(measured_rows, dim=0))
        elif mini.rejection_mask is None:
            mini = mini.replace(rejection_mask=join(decided_rows, dim=0))
        self._divide_gradients(parts)
        self._step(metrics)
        return mini

    def _divide_gradients(self, parts: Tensor) -> None:
        """Sums the gradients over processes and divides them by what the loss counts.

        Args:
          parts: sum of `LossTerms.parts` over the micro-batches of this process, [3].
        """
        self._processes.sum_gradients(self._parameters)
        scale = 1 / denominator(parts, self._processes.sum)
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(scale)

    def _accumulate(
        self, piece: Batch, metrics: MetricBag
    ) -> tuple[Tensor, Measured, Tensor | None]:
        """Adds the gradient of one forward.

        Args:
          piece: what one forward evaluates, [b, t].
          metrics: takes in the metrics of the loss.

        Returns:
          What the denominator needs, [3], the forward without its gradient, and the steps that are
          kept, [b, t], if that was decided before the loss.
        """
        now = self._policy.evaluate(piece)
        keep_means = self._mode.keep_means and piece.old_log_probs is None
        seen = [self._seen(*part) for part in self._mode.seen_at_once(piece, now)]
        total = torch.stack([one.terms.total for one in seen]).sum()
        if self._config.use_kl_loss:
            share = torch.cat([one.terms.share for one in seen], 1)
            total = total + self._penalty(now, piece, share, metrics)
        total.backward()
        self._spoil_unless_finite(total)
        for one in seen:
            metrics.merge(one.terms.metrics)
            self._mode.observe(one, updated=self._updates_here > 0)
        parts = torch.stack([one.terms.parts() for one in seen]).sum(0)
        decision = join([one.piece.rejection_mask for one in seen], dim=1)
        return parts, Measured.of(now, keep_means=keep_means), decision

    def _seen(self, piece: Batch, now: Evaluation) -> Seen:
        """Computes the loss of what it sees at once, [b, t]."""
        piece, gaussian = self._mode.enter(piece, now, updates=self._updates_here)
        terms = self._loss(now.log_probs, piece, gaussian)
        return Seen(piece, now.log_probs, gaussian, terms)

    def _accumulate_window(self, micro: Batch, metrics: MetricBag) -> tuple[Tensor, Tensor | None]:
        """Adds the gradient of a loss of all steps of a sample, with the memory of one forward.

        By the chain rule, in two passes:

            d loss / d weights = sum_t (d loss / d log_prob_t) (d log_prob_t / d weights)

        The first evaluates all steps without graphs and differentiates the loss by their log-probs.
        The second evaluates the steps of one forward with a graph, and multiplies. The exact KL and
        the centered log-ratio of the steps, if the loss reads them, are treated like the log-probs.

        Args:
          micro: samples with all steps of their windows, [b, T].
          metrics: takes in the metrics of the loss.

        Returns:
          What the denominator needs, [3], and the steps that are kept, [b, T], if that was decided
          before the loss.
        """
        measured = self._policy.measure(micro, len(micro))
        micro, gaussian = self._mode.enter(micro, measured, updates=self._updates_here)
        log_probs = measured.log_probs.requires_grad_()
        for leaf in _leaves(gaussian):
            leaf.requires_grad_()
        terms = self._loss(log_probs, micro, gaussian)
        terms.total.backward()
        start = 0
        for piece in self._policy.pieces(micro):
            now = self._policy.evaluate(piece)
            here = slice(start, start + piece.num_steps)
            total = (now.log_probs * _slope(log_probs)[:, here]).sum()
            for leaf, value in zip(_leaves(gaussian), _leaves(now.gaussian), strict=True):
                total = total + (value * _slope(leaf)[:, here]).sum()
            if self._config.use_kl_loss:
                total = total + self._penalty(now, piece, terms.share[:, here], metrics)
            total.backward()
            start = here.stop
        self._spoil_unless_finite(terms.total)
        metrics.merge(terms.metrics)
        seen = Seen(micro, log_probs, gaussian, terms)
        self._mode.observe(seen, updated=self._updates_here > 0)
        return terms.parts(), micro.rejection_mask

    def _spoil_unless_finite(self, loss: Tensor) -> None:
        """Makes the gradient NaN if the loss is not finite: then all processes skip the update."""
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if gradients:
            gradients[0].add_(0 * loss.detach())

    def _penalty(self, now: Evaluation, piece: Batch, share: Tensor, metrics: MetricBag) -> Tensor:
        """Returns kl_loss_coef times the KL to the base model; steps count with their share."""
        counted = share > 0
        with torch.no_grad(), reference_policy(self._policy.network):
            reference = self._policy.evaluate(piece)
        penalty = select(self._policy.divergence(now, reference, piece), counted)
        metrics.mean("kl_loss", penalty, counted)
        return self._config.kl_loss_coef * (penalty * share).sum()

    def _step(self, metrics: MetricBag) -> None:
        """Clips the gradient and takes the optimizer step; skips a gradient that is not finite.

        The host waits for the device twice: for the norm, and for whether all numbers are finite.
        """
        norm = nn.utils.clip_grad_norm_(self._parameters, self._config.optim.clip_grad)
        value = norm.item()
        metrics.max("lr", torch.tensor(float(self._schedule.get_last_lr()[0]), dtype=torch.float64))
        if math.isfinite(value):
            self._optimizer.step()
            self._schedule.step()
            self._updates += 1
            self._nonfinite_in_a_row = 0
            if self.ema is not None and self._updates % self._config.ema.update_interval == 0:
                self.ema.step(self._parameters)
            broken = not_finite(self.tensors())
            if broken:
                raise NonFiniteWeights(
                    f"update {self._updates} has left {len(broken)} tensors with numbers that are "
                    f"not finite, the first is {broken[0]}"
                )
        else:
            self._nonfinite_updates += 1
            self._nonfinite_in_a_row += 1
        self._optimizer.zero_grad(set_to_none=True)
        finite = torch.isfinite(norm)
        metrics.mean("grad_norm", norm, finite)
        metrics.mean("nonfinite_update_fraction", (~finite).double())
        if self._nonfinite_in_a_row >= MOST_NONFINITE:
            raise NonFiniteGradient(
                f"the gradient was not finite in {self._nonfinite_in_a_row} updates in a row; "
                "lower actor.optim.lr"
            )

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Returns what a checkpoint holds: `lora`, `optimizer` and, if there is one, `ema`."""
        tensors = {
            "lora": self.lora_state(),
            "optimizer": optimizer_tensors(self._optimizer, self._named),
        }
        if self.ema is not None:
            tensors["ema"] = dict(zip(self._named, self.ema.shadow_params, strict=True))
        return tensors

    def state(self) -> dict[str, Any]:
        """Returns the numbers beside the tensors; JSON can hold them."""
        return {
            "updates": self._updates,
            "nonfinite_updates": self._nonfinite_updates,
            "nonfinite_in_a_row": self._nonfinite_in_a_row,
            "lr_schedule": schedule_state(self._schedule),
            "ema_step": 0 if self.ema is None else self.ema.optimization_step,
        }

    def load(self, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> None:
        """Goes back to what `tensors` and `state` recorded, bit for bit.

        Raises:
          CheckpointError: they are not of this run.
        """
        lora = check_tensors("lora", tensors["lora"], self.lora_state())
        for name, parameter in self._named.items():
            parameter.data.copy_(lora[name])
        load_optimizer(self._optimizer, self._named, tensors["optimizer"])
        if self.ema is not None:
            ema = check_tensors("ema", tensors["ema"], self.tensors()["ema"])
            for shadow, name in zip(self.ema.shadow_params, self._named, strict=True):
                shadow.copy_(ema[name])
            self.ema.optimization_step = state["ema_step"]
        self._updates = state["updates"]
        self._nonfinite_updates = state["nonfinite_updates"]
        self._nonfinite_in_a_row = state["nonfinite_in_a_row"]
        load_schedule(self._schedule, state["lr_schedule"])


def _leaves(gaussian: GaussianSteps | None) -> list[Tensor]:
    """Returns what a loss may differentiate besides log-probs: the KL and the centered log-ratio.

    Args:
      gaussian: Gaussians of the steps, [b, t]; None if steps are no Gaussians.
    """
    if gaussian is None:
        return []
    return [fact for fact in (gaussian.kl, gaussian.centered) if fact is not None]


def _slope(leaf: Tensor) -> Tensor:
    """Returns the gradient that a backward left at a tensor; 0 if the loss does not read it."""
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
