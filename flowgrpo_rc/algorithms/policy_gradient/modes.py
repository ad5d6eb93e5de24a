"""The two modes of rollout correction: what the old policy is, and where the correction comes in.

Bypass: the old policy is the rollout's, as recorded. The correction, current / rollout, is part of
the loss. Decoupled: the old policy is the training graph before the first update of an iteration.
The correction, old / rollout, is computed once for each batch.

No other file asks which mode it is in.

Legend: b rows of a micro-batch, t steps that one forward evaluates, B and T those of a whole batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowgrpo_rc.algorithms.policy_gradient.algorithm import ForwardOutcome, PolicyGradient, Seen
from flowgrpo_rc.batch import Batch, DiffusionBatch
from flowgrpo_rc.core.metrics import MetricBag
from flowgrpo_rc.core.transition import GaussianSteps
from flowgrpo_rc.correction.api import apply_bypass_mode
from flowgrpo_rc.correction.correct import Corrector, require_rollout_log_probs
from flowgrpo_rc.monitoring.health import BYPASS_PREFIX, DECOUPLED_PREFIX
from flowgrpo_rc.policies.base import Evaluation


@dataclass(kw_only=True, eq=False)
class Bypass(PolicyGradient):
    """Takes the rollout's log-probs for the old policy's; the loss corrects current / rollout.

    The `auto` bands judge each sample once, by the first forward of the update that it is in.
    """

    recomputes = False
    prefix = BYPASS_PREFIX.removesuffix("/")

    def begin(self, batch: Batch, step: int) -> Batch:
        """Returns the batch with old := rollout. Raises ValueError if the rollout recorded none."""
        self.monitor.expect(batch, step)
        return apply_bypass_mode(batch)

    def enter(
        self, piece: Batch, now: Evaluation, *, updates: int
    ) -> tuple[Batch, GaussianSteps | None]:
        """Returns the piece with the decision of the `auto` bands, if it has none yet, and with
        the bound of the loss, if that follows the mismatch.
        """
        # Never twice: later epochs come after updates, which have moved the policy on purpose.
        if self.auto_bands is not None and piece.rejection_mask is None:
            assert isinstance(piece, DiffusionBatch)  # the configuration allows them for no other
            piece, judged = self.auto_bands.judge(
                piece, now.log_probs.detach(), now.step_kl, updates=updates
            )
            self._metrics.merge(judged)
        if self.auto_clip is not None:
            assert isinstance(piece, DiffusionBatch)  # the configuration allows it for nothing else
            piece = piece.replace(loss_bound=self.auto_clip.bounds(piece.step_indices))
        return piece, now.gaussian

    def leave(self, mini: Batch, outcome: ForwardOutcome) -> Batch:
        """Returns the mini-batch with its decision: later epochs judge no sample again."""
        return mini.replace(rejection_mask=outcome.decision)

    def observe(self, seen: Seen, *, updated: bool) -> None:
        """Notes the loss, its decisions and, before any update, the mismatch."""
        super().observe(seen, updated=updated)
        if not updated:
            self.monitor.before_update(seen.piece, seen.log_probs)
            if self.auto_clip is not None:
                assert isinstance(seen.piece, DiffusionBatch)
                self.auto_clip.observe(seen.piece, seen.log_probs, seen.gaussian)
        self.decisions.add(
            seen.piece,
            seen.log_probs,
            self.policy.cells(seen.piece),
            seen.terms.keep_mask,
            None if seen.gaussian is None else seen.gaussian.kl,
        )


@dataclass(kw_only=True, eq=False)
class Decoupled(PolicyGradient):
    """Recomputes the old policy with the training graph, and corrects old / rollout once a batch.

    With `own_forwards` the old policy of the first mini-batch is its own forward, detached: nothing
    has been updated by then. `correction.recompute.why_recompute` says where that may be.
    """

    recomputes = True
    prefix = DECOUPLED_PREFIX.removesuffix("/")
    corrector: Corrector
    own_forwards: bool = False

    def begin(self, batch: Batch, step: int) -> Batch:
        """Returns the batch with its old policy and correction.

        If the update's forwards will tell them, only steps that are not finite are rejected now.
        """
        self.monitor.expect(batch, step)
        if not self.own_forwards:
            return self._recomputed(batch)
        # Baselines come before the update's forwards, and must leave out what cannot be trained on.
        return batch.replace(rejection_mask=torch.isfinite(require_rollout_log_probs(batch)))

    def before_update(self, minis: Sequence[Batch]) -> list[Batch]:
        """Recomputes the old policy of all mini-batches but the first, where they have none."""
        # All at once and now: the update of the first mini-batch moves the policy.
        minis = list(minis)
        if not minis or minis[0].old_log_probs is not None:
            return minis
        return [minis[0], *(self._recomputed(mini) for mini in minis[1:])]

    def enter(
        self, piece: Batch, now: Evaluation, *, updates: int
    ) -> tuple[Batch, GaussianSteps | None]:
        """Fills in the old policy and the correction of a piece that has none.

        No update has come before, so the old policy is this forward, detached. The ratio is exactly
        1, and the KL of the steps from themselves is 0. `leave` does the same for the whole
        mini-batch and keeps its metrics.
        """
        gaussian = now.gaussian
        if piece.old_log_probs is not None:
            return piece, gaussian
        old = now.detached()
        step_kl = old.step_kl
        if self.auto_bands is not None:
            # `leave` judges the same samples again, and remembers them then.
            piece, _ = self._judge(piece, now.log_probs, step_kl, remember=False)
        piece = piece.with_old(old.log_probs, centered=self._kept(old))
        piece, _ = self.corrector.batch(piece, step_kl=step_kl)
        if gaussian is not None:
            # The KL that came is from the rollout; that of the old policy from itself is 0.
            gaussian = gaussian._replace(kl=torch.zeros_like(gaussian.std))
        return piece, gaussian

    def leave(self, mini: Batch, outcome: ForwardOutcome) -> Batch:
        """Returns the mini-batch with its old policy and correction, if it had none.

        No update came before these forwards, so they are those of the old policy.
        """
        return self._with_old(mini, outcome.now) if mini.old_log_probs is None else mini

    def _with_old(self, batch: Batch, old: Evaluation) -> Batch:
        """Returns a batch with its old policy and the correction that follows from it."""
        if self.auto_bands is not None:
            batch, judged = self._judge(batch, old.log_probs, old.step_kl, remember=True)
            self._metrics.merge(judged)
        batch = batch.with_old(old.log_probs, old.means, self._kept(old))
        batch, metrics = self.corrector.batch(
            batch, step_kl=old.step_kl, all_reduce=self.processes.sum
        )
        self.monitor.before_update(batch, old.log_probs)
        self._metrics.merge(metrics)
        assert batch.rejection_mask is not None
        self.decisions.add(
            batch, old.log_probs, self.policy.cells(batch), batch.rejection_mask, old.step_kl
        )
        return batch

    def _kept(self, old: Evaluation) -> Tensor | None:
        """Returns the centered log-ratio of the old policy to the rollout if the loss takes it."""
        return old.centered if self.centered else None

    def _recomputed(self, batch: Batch) -> Batch:
        """Returns the batch with its old policy, by forwards of its own, and its correction."""
        measured = self.policy.measure(batch, self.micro_batch_size, keep_means=self.keep_means)
        return self._with_old(batch, measured)

    def _judge(
        self, batch: Batch, log_probs: Tensor, step_kl: Tensor | None, *, remember: bool
    ) -> tuple[Batch, MetricBag]:
        """Returns the batch with the decision of the `auto` bands, and their metrics."""
        assert self.auto_bands is not None
        assert isinstance(batch, DiffusionBatch)  # the configuration allows them for nothing else
        return self.auto_bands.judge(batch, log_probs, step_kl, remember=remember)


def make_mode(
    corrector: Corrector, *, own_forwards: bool, keep_means: bool, **shared: Any
) -> PolicyGradient:
    """Makes the mode that the settings ask for; `shared` are the attributes that both modes have.

    `own_forwards` and `keep_means` are those of decoupled mode.
    """
    correction = corrector.config
    shared["centered"] = bool(correction.centered)
    if correction.bypass_mode:
        return Bypass(whole_windows=correction.bypass_level == "window", **shared)
    return Decoupled(
        corrector=corrector, own_forwards=own_forwards, keep_means=keep_means, **shared
    )
