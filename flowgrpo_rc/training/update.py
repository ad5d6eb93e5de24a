"""The update: the losses of an algorithm become optimizer steps on the LoRA."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from diffusers.training_utils import EMAModel
from torch import Tensor, nn

from flowgrpo_rc.algorithms.algorithm import Algorithm, Forward
from flowgrpo_rc.batch import Batch
from flowgrpo_rc.core.metrics import MetricBag
from flowgrpo_rc.core.reduce import select
from flowgrpo_rc.distributed.processes import Processes
from flowgrpo_rc.losses.base import denominator
from flowgrpo_rc.models.lora import lora_parameters, other_weights, reference_policy
from flowgrpo_rc.records.checkpoint import check_tensors, not_finite
from flowgrpo_rc.records.optimizer_state import (
    load_optimizer,
    load_schedule,
    optimizer_tensors,
    schedule_state,
)
from flowgrpo_rc.training.config import ActorConfig
from flowgrpo_rc.training.optim import drowned_by_eps, make_optimizer, make_schedule


class NonFiniteGradient(FloatingPointError):
    """Says that too many updates in a row had a gradient that is not finite."""


class NonFiniteWeights(FloatingPointError):
    """Says that an update has left weights, moments or averages that are not finite."""


# So many updates in a row without a finite gradient end the run; each is skipped.
MOST_NONFINITE = 5


class PolicyUpdate:
    """Trains the LoRA by the losses of an algorithm; owns optimizer, schedule and average."""

    def __init__(
        self,
        algorithm: Algorithm[Any],
        config: ActorConfig,
        processes: Processes,
        *,
        total_updates: int,
    ) -> None:
        """Makes the optimizer, and a learning-rate schedule of `total_updates` updates."""
        self._algorithm = algorithm
        self._config = config
        self._processes = processes
        self._named = lora_parameters(algorithm.policy.network)
        self.parameters = list(self._named.values())
        self._optimizer = make_optimizer(self.parameters, config.optim)
        self._schedule = make_schedule(self._optimizer, config.optim, total_updates)
        # Before a checkpoint is loaded, so a resumed run has the same.
        self._start: dict[str, Tensor] | None = None
        if config.kl_reference == "start":
            self._start = {name: tensor.clone() for name, tensor in self.lora_state().items()}
        self.ema: EMAModel | None = None
        if config.ema.enable:
            self.ema = EMAModel(self.parameters, decay=config.ema.decay)
        self._updates = 0
        self._updates_here = 0
        self._nonfinite_updates = 0
        self._nonfinite_in_a_row = 0

    def lora_state(self) -> dict[str, Tensor]:
        """Returns the LoRA tensors by name (detached views)."""
        return {name: parameter.detach() for name, parameter in self._named.items()}

    def run(
        self, batch: Batch, samples_per_mini_batch: int, ready: Callable[[int], None] | None = None
    ) -> MetricBag:
        """Takes all optimizer steps of an iteration, each on so many samples of this process.

        Before the first use of a mini-batch, `ready` is asked to fill in the advantages of all
        samples up to its end, in place.
        """
        metrics = MetricBag()
        self._updates_here = 0
        minis = self._algorithm.before_update(batch.split(samples_per_mini_batch))
        for epoch in range(self._config.ppo_epochs):
            for index, mini in enumerate(minis):
                if ready is not None and epoch == 0:
                    ready((index + 1) * samples_per_mini_batch)
                minis[index] = self._mini_batch(mini, metrics)
                self._updates_here += 1
        metrics.max("nonfinite_updates", torch.tensor(float(self._nonfinite_updates)))
        metrics.ratio("adam_eps_fraction", *drowned_by_eps(self._optimizer))
        self._check_weights()  # once an iteration, before its state can be saved
        return metrics

    def _check_weights(self) -> None:
        if broken := not_finite(self.tensors()):
            raise NonFiniteWeights(
                f"updates up to {self._updates} have left {len(broken)} tensors with numbers that "
                f"are not finite, the first is {broken[0]}"
            )

    def _mini_batch(self, mini: Batch, metrics: MetricBag) -> Batch:
        """Takes one optimizer step; returns the mini-batch as later epochs take it."""
        backward = partial(self._backward, metrics=metrics)
        mini, counts = self._algorithm.loss(mini, backward, metrics, updates=self._updates_here)
        self._divide_gradients(counts)
        self._step(metrics)
        return mini

    def _divide_gradients(self, counts: Tensor) -> None:
        """Sums the gradients over processes, and divides once by what the loss counts in all."""
        self._processes.sum_gradients(self.parameters)
        scale = 1 / denominator(counts, self._processes.sum)
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(scale)

    def _backward(self, forward: Forward, metrics: MetricBag) -> None:
        """Adds the gradient of a forward, and of its KL penalty if there is one."""
        total = forward.total
        if self._config.use_kl_loss:
            total = total + self._penalty(forward, metrics)
        total.backward()
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        if gradients:  # NaN if the loss is not finite: then all processes skip the update
            gradients[0].add_(0 * total.detach())

    def _penalty(self, forward: Forward, metrics: MetricBag) -> Tensor:
        """Returns kl_loss_coef times the KL to the reference; steps count with their share."""
        policy = self._algorithm.policy
        as_reference = reference_policy(policy.network)
        if self._start is not None:
            as_reference = other_weights(self._named, self._start)
        counted = forward.share > 0
        with torch.no_grad(), as_reference:
            reference = policy.evaluate(forward.piece)
        divergence = policy.divergence(forward.now, reference, forward.piece)
        # A select: a rejected step may have a divergence that is not finite.
        penalty = select(divergence, counted)
        metrics.mean("kl_loss", penalty, counted)
        return self._config.kl_loss_coef * (penalty * forward.share).sum()

    def _step(self, metrics: MetricBag) -> None:
        """Clips the gradient and takes the optimizer step; skips a gradient that is not finite."""
        norm = nn.utils.clip_grad_norm_(self.parameters, self._config.optim.clip_grad)
        value = norm.item()  # here the host waits for the device
        metrics.max("lr", torch.tensor(float(self._schedule.get_last_lr()[0]), dtype=torch.float64))
        if math.isfinite(value):
            self._optimizer.step()
            self._schedule.step()
            self._updates += 1
            self._nonfinite_in_a_row = 0
            if self.ema is not None and self._updates % self._config.ema.update_interval == 0:
                self.ema.step(self.parameters)
        else:
            self._nonfinite_updates += 1
            self._nonfinite_in_a_row += 1
        self._optimizer.zero_grad(set_to_none=True)
        finite = torch.isfinite(norm)
        metrics.mean("grad_norm", norm, finite)
        metrics.mean("nonfinite_update_fraction", (~finite).double())
        if self._nonfinite_in_a_row >= MOST_NONFINITE:
            self._check_weights()
            raise NonFiniteGradient(
                f"the gradient was not finite in {self._nonfinite_in_a_row} updates in a row; "
                "lower actor.optim.lr"
            )

    def check_trained(self) -> None:
        """Raises NonFiniteGradient if every update so far was skipped, so that nothing learned."""
        if self._nonfinite_updates and not self._updates:
            raise NonFiniteGradient(
                f"every update of the run ({self._nonfinite_updates}) was skipped, since its "
                "gradient was not finite, so there is no trained LoRA"
            )

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Gives the LoRA its average inside the context, and its own values back, bit for bit."""
        if self.ema is None:
            yield
            return
        self.ema.store(self.parameters)
        self.ema.copy_to(self.parameters)
        try:
            yield
        finally:
            self.ema.restore(self.parameters)

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Returns what a checkpoint holds: `lora`, `optimizer` and, if there is one, `ema`."""
        tensors = {
            "lora": self.lora_state(),
            "optimizer": optimizer_tensors(self._optimizer, self._named),
        }
        if self.ema is not None:
            tensors["ema"] = dict(zip(self._named, self.ema.shadow_params, strict=True))
        return tensors

    def state(self) -> dict[str, object]:
        """Returns the numbers beside the tensors; JSON can hold them."""
        return {
            "updates": self._updates,
            "nonfinite_updates": self._nonfinite_updates,
            "nonfinite_in_a_row": self._nonfinite_in_a_row,
            "lr_schedule": schedule_state(self._schedule),
            "ema_step": 0 if self.ema is None else self.ema.optimization_step,
        }

    def load(self, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> None:
        """Goes back to what `tensors` and `state` recorded, bit for bit; else CheckpointError."""
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
