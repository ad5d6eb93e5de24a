"""The old policy of decoupled mode: the training graph before the first update of an iteration, and
the correction that follows from it, old / rollout."""

from __future__ import annotations

from typing import Any

import torch

from flowgrpo_rc.batch import Batch, DiffusionBatch
from flowgrpo_rc.core.metrics import MetricBag
from flowgrpo_rc.core.transition import GaussianSteps
from flowgrpo_rc.correction.api import apply_rollout_correction_to_batch
from flowgrpo_rc.correction.auto_bands import AutoBands
from flowgrpo_rc.correction.config import RolloutCorrectionConfig
from flowgrpo_rc.correction.correct import require_rollout_log_probs
from flowgrpo_rc.correction.thresholds import KEY
from flowgrpo_rc.distributed.processes import Processes
from flowgrpo_rc.monitoring.decisions import Decisions
from flowgrpo_rc.monitoring.mismatch import MismatchMonitor
from flowgrpo_rc.policies.base import Evaluation, Measured, Policy


class OldPolicy:
    """Fills in the old log-probs of batches, and the weights and the mask that follow from them.

    reuses: the old policy of the first mini-batch is its own forward, detached: nothing has been
        updated by then. `why_recompute` says where that may be.
    micro_batch_size: that of the update, so that both see the same shapes. keep_means: the loss
        compares steps with
        those of the old policy. observations: is told every decision.
    """

    def __init__(
        self,
        policy: Policy[Any, Any],
        correction: RolloutCorrectionConfig,
        processes: Processes,
        floor: MismatchMonitor,
        *,
        micro_batch_size: int,
        reuses: bool,
        keep_means: bool = False,
        auto_bands: AutoBands | None = None,
        observations: Decisions | None = None,
    ) -> None:
        self.reuses, self.keep_means = reuses, keep_means
        self._policy, self._correction, self._processes, self._floor = (
            policy,
            correction,
            processes,
            floor,
        )
        self._micro_batch_size, self._auto_bands = micro_batch_size, auto_bands
        self._observations = observations
        self._metrics = MetricBag()

    def before_rewards(self, batch: Batch) -> Batch:
        """The batch with its old policy; where forwards of the update will tell, with what is
        rejected in any case.
        """
        if not self.reuses:
            return self.recompute(batch)
        return batch.replace(rejection_mask=torch.isfinite(require_rollout_log_probs(batch)))

    def recompute(self, batch: Batch) -> Batch:
        """The batch with its old policy, by forwards for nothing else."""
        return self.correct(
            batch, self._policy.measure(batch, self._micro_batch_size, keep_means=self.keep_means)
        )

    def correct(self, batch: Batch, old: Measured) -> Batch:
        """The batch with `old` as its old policy and the correction that follows; remembers the
        metrics.
        """
        if self._auto_bands is not None:
            assert isinstance(
                batch, DiffusionBatch
            )  # the configuration allows them for nothing else
            batch, judged = self._auto_bands.judge(batch, old.log_probs, old.step_kl)
            self._metrics.merge(judged)
        batch = batch.with_old(old.log_probs, old.means)
        batch, metrics = apply_rollout_correction_to_batch(
            batch, self._correction, step_kl=old.step_kl, all_reduce=self._processes.sum
        )
        self._floor.before(batch, old.log_probs)
        self._metrics.merge(metrics)
        if self._observations is not None:
            assert batch.rejection_mask is not None
            cells, kept, weights = (
                self._policy.cells(batch),
                batch.rejection_mask,
                batch.rollout_is_weights,
            )
            self._observations.add(batch, old.log_probs, cells, kept, weights, old.step_kl)
        return batch

    def own(self, piece: Batch, now: Evaluation) -> tuple[Batch, GaussianSteps | None]:
        """A piece of the first mini-batch with its own forward as its old policy, so that the ratio
        is exactly 1; and the Gaussians of its steps, whose KL from themselves is 0."""
        gaussian = now.gaussian
        step_kl = None if gaussian is None else gaussian.kl
        if self._auto_bands is not None:
            assert isinstance(piece, DiffusionBatch)
            piece, _ = self._auto_bands.judge(piece, now.log_probs, step_kl, remember=False)
        piece = piece.with_old(now.log_probs.detach(), None)
        piece, _ = apply_rollout_correction_to_batch(piece, self._correction, step_kl=step_kl)
        if gaussian is not None:
            gaussian = gaussian._replace(kl=torch.zeros_like(gaussian.std))
        return piece, gaussian

    def finish(self) -> MetricBag:
        """The end of an iteration: the `auto` bands take it in. Returns the metrics of its
        correction, names without prefix."""
        if self._auto_bands is not None:
            self._auto_bands.finish(self._processes.gather)
        found, self._metrics = self._metrics, MetricBag()
        return found


def why_recompute(correction: RolloutCorrectionConfig, *, sees_rows: bool) -> str | None:
    """Why the first mini-batch's own forwards cannot be its old policy; None where they can.

    They come one after the other and after the advantages, so that each piece's correction has to
    follow from that
    piece alone. sees_rows: one forward evaluates all steps of a sample.
    """
    rules = correction.rules()
    rejects = bool(rules.bands or rules.auto) or rules.log_veto is not None
    rejects = rejects or (rules.level is not None and rules.bounds.mode == "mask")
    judges_rows = rules.log_veto is not None or not all(
        band.per_step for band in (*rules.bands, *rules.auto)
    )
    of_rows = judges_rows or not rules.per_step
    reasons = (
        (correction.custom_correction is not None, f"{KEY}.custom_correction sees the whole batch"),
        (
            rules.batch_normalize,
            f"{KEY}.rollout_is_batch_normalize takes the mean weight of the whole batch",
        ),
        (
            rejects and correction.excludes_rejected,
            "a rejected sample leaves the baseline of its group, which the update needs first "
            f"({KEY}.exclude_rejected=false keeps it there)",
        ),
        (
            of_rows and not sees_rows,
            "weights or criteria of sequences need all steps, and a forward sees one",
        ),
    )
    return next((reason for holds, reason in reasons if holds), None)
