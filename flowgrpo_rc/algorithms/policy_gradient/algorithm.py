"""Policy gradients: the losses of recorded steps, by ratios of their log-probs.

Two modes say what the old policy of the ratio is and where the rollout correction comes in:
`modes.Bypass` and `modes.Decoupled`.

Legend: b rows of a micro-batch, t steps that one forward evaluates or one loss sees, B and T those
of a whole batch.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from flowgrpo_rc.algorithms.algorithm import Algorithm, Backward, Forward
from flowgrpo_rc.batch import Batch
from flowgrpo_rc.core.metrics import MetricBag
from flowgrpo_rc.core.transition import GaussianSteps
from flowgrpo_rc.correction.auto_bands import AutoBands
from flowgrpo_rc.distributed.processes import Processes
from flowgrpo_rc.losses.auto_clip import AutoClip
from flowgrpo_rc.losses.base import LossTerms
from flowgrpo_rc.monitoring.decisions import Decisions
from flowgrpo_rc.monitoring.mismatch import MismatchMonitor
from flowgrpo_rc.policies.base import Evaluation, Policy, join

# (log-probs [b, t], samples, Gaussians of the steps or None) -> the terms of the loss.
Loss = Callable[[Tensor, Batch, GaussianSteps | None], LossTerms]
# Names in a checkpoint.
_AUTO_BANDS = "auto_bands"
_AUTO_CLIP = "auto_clip"
_MISMATCH = "noise_floor"


class Seen(NamedTuple):
    """Holds what a loss was computed from."""

    piece: Batch
    log_probs: Tensor  # of the current policy, [b, t]
    gaussian: GaussianSteps | None  # of the steps, [b, t]; None for tokens
    terms: LossTerms


class ForwardOutcome(NamedTuple):
    """Keeps what forwards say once their gradients are added; `join` puts several together."""

    now: Evaluation  # without gradients, [b, t]
    decision: Tensor | None  # the steps that are kept, bool [b, t]; None if the loss decided that


@dataclass(kw_only=True, eq=False)
class PolicyGradient(Algorithm[Batch]):
    """What the two modes have in common: forwards, losses, and what follows the mismatch.

    For each forward of an update a mode is asked for two things: `enter` before the loss and
    `observe` after it. `leave` comes after the last forward of a mini-batch.
    """

    prefix: ClassVar[str]  # of the correction's metrics
    recomputes: ClassVar[bool]  # whether the training graph gives the old policy's log-probs
    policy: Policy[Batch]
    terms: Loss  # such as `objective.Objective.terms`
    processes: Processes
    monitor: MismatchMonitor
    micro_batch_size: int  # samples of a forward
    auto_bands: AutoBands | None = None
    auto_clip: AutoClip | None = None  # in bypass mode; None for a bound that is a number
    whole_windows: bool = False  # whether the loss sees all steps of a sample at once
    keep_means: bool = False  # whether `leave` needs the means of the steps
    centered: bool = False  # whether the loss takes centered log-ratios to the rollout
    decisions: Decisions = field(default_factory=Decisions)
    _metrics: MetricBag = field(default_factory=MetricBag, init=False)

    @abstractmethod
    def enter(
        self, piece: Batch, now: Evaluation, *, updates: int
    ) -> tuple[Batch, GaussianSteps | None]:
        """Returns a piece, [b, t], as the loss takes it, and the Gaussians of its steps.

        `now` is what a forward says of the current policy on it; `updates` of the iteration came
        before.
        """

    @abstractmethod
    def leave(self, mini: Batch, outcome: ForwardOutcome) -> Batch:
        """Returns a mini-batch, [B, T], for later epochs, with the outcome of its forwards before
        its update.
        """

    def observe(self, seen: Seen, *, updated: bool) -> None:
        """Notes what a loss was computed from; `updated`: after an update of this iteration."""
        if updated:
            self.monitor.after_update(seen.piece, seen.log_probs)
        else:
            self.monitor.clipped(seen.terms.metrics)

    def loss(
        self, mini: Batch, backward: Backward, metrics: MetricBag, *, updates: int
    ) -> tuple[Batch, Tensor]:
        """Computes the loss of a mini-batch; see `Algorithm.loss`."""
        # Sums: the update divides once, when all processes have added theirs.
        counts = torch.zeros(3, dtype=torch.float64, device=mini.group.device)
        rows = []
        for micro in mini.split(self.micro_batch_size):
            pieces = list(self.policy.pieces(micro))
            if self.whole_windows and len(pieces) > 1:
                results = [self._window(micro, backward, metrics, updates)]
            else:
                results = [self._piece(piece, backward, metrics, updates) for piece in pieces]
            counts = counts + sum(of_piece for of_piece, _ in results)
            rows.append(join([outcome for _, outcome in results], dim=1))
        return self.leave(mini, join(rows, dim=0)), counts

    def _piece(
        self, piece: Batch, backward: Backward, metrics: MetricBag, updates: int
    ) -> tuple[Tensor, ForwardOutcome]:
        """Differentiates the loss of what one forward evaluates, [b, t]."""
        now = self.policy.evaluate(piece)
        # Means are as large as the latents: they are kept only until the old policy is known.
        keep_means = self.keep_means and piece.old_log_probs is None
        cuts = [(piece, now)] if self.whole_windows else self.policy.steps(piece, now)
        seen = [self._seen(*cut, updates) for cut in cuts]
        total = torch.stack([loss.terms.total for loss in seen]).sum()
        share = torch.cat([loss.terms.share for loss in seen], 1)
        # One backward for all steps of the forward: they share its graph, which is gone then.
        backward(Forward(piece, now, total, share))
        for loss in seen:
            metrics.merge(loss.terms.metrics)
            self.observe(loss, updated=updates > 0)
        counts = torch.stack([loss.terms.counts for loss in seen]).sum(0)
        decision = join([loss.piece.rejection_mask for loss in seen], dim=1)
        return counts, ForwardOutcome(now.detached(keep_means=keep_means), decision)

    def _seen(self, piece: Batch, now: Evaluation, updates: int) -> Seen:
        piece, gaussian = self.enter(piece, now, updates=updates)
        return Seen(piece, now.log_probs, gaussian, self.terms(now.log_probs, piece, gaussian))

    def _window(
        self, micro: Batch, backward: Backward, metrics: MetricBag, updates: int
    ) -> tuple[Tensor, ForwardOutcome]:
        """Differentiates a loss of all steps of a sample, [b, T], with the memory of one forward.

            d loss / d weights = sum_t (d loss / d log_prob_t) (d log_prob_t / d weights)

        The first pass evaluates all steps without graphs and differentiates the loss by their
        log-probs. The second evaluates the steps of one forward with a graph, and multiplies. The
        exact KL and the centered log-ratio of the steps, if the loss reads them, are treated like
        the log-probs.
        """
        measured = self.policy.measure(micro, len(micro))
        micro, gaussian = self.enter(micro, measured, updates=updates)
        log_probs = measured.log_probs.requires_grad_()
        leaves = [log_probs, *_leaves(gaussian)]
        for leaf in leaves:
            leaf.requires_grad_()
        terms = self.terms(log_probs, micro, gaussian)
        terms.total.backward()
        # A loss that does not read a leaf leaves it without a slope.
        slopes = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
        start = 0
        for piece in self.policy.pieces(micro):
            now = self.policy.evaluate(piece)
            steps = slice(start, start + piece.num_steps)
            values = [now.log_probs, *_leaves(now.gaussian)]
            products = (v * s[:, steps] for v, s in zip(values, slopes, strict=True))
            # The sum is not the loss, whose value may be infinite where no slope is: 0 times the
            # loss makes the update see that.
            total = sum((product.sum() for product in products), 0 * terms.total.detach())
            backward(Forward(piece, now, total, terms.share[:, steps]))
            start = steps.stop
        metrics.merge(terms.metrics)
        self.observe(Seen(micro, log_probs, gaussian, terms), updated=updates > 0)
        return terms.counts, ForwardOutcome(measured.detached(), micro.rejection_mask)

    def finish(self, metrics: MetricBag) -> None:
        """Ends the iteration: adds the metrics of correction and mismatch, under full names."""
        for follower in self._followers().values():
            follower.finish(self.processes.gather)
        metrics.merge(self._metrics, self.prefix)
        mismatch = self.monitor.finish(recomputes=self.recomputes)
        metrics.replace(mismatch, self.prefix)
        self._metrics = MetricBag()

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Returns what follows the mismatch from iteration to iteration, by part."""
        tensors = {name: follower.tensors() for name, follower in self._followers().items()}
        if monitor := self.monitor.tensors():
            tensors[_MISMATCH] = monitor
        return tensors

    def load(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Goes back to what `tensors` recorded."""
        for name, follower in self._followers().items():
            follower.load(tensors[name])
        self.monitor.load(tensors.get(_MISMATCH, {}))

    def _followers(self) -> dict[str, AutoBands | AutoClip]:
        followers = {_AUTO_BANDS: self.auto_bands, _AUTO_CLIP: self.auto_clip}
        return {name: follower for name, follower in followers.items() if follower is not None}


def _leaves(gaussian: GaussianSteps | None) -> list[Tensor]:
    """Returns what a loss may differentiate besides log-probs: KL and centered log-ratio."""
    if gaussian is None:
        return []
    return [fact for fact in (gaussian.kl, gaussian.centered) if fact is not None]
