"""Whether decoupled mode may take forwards of the update for its old policy."""

from flowgrpo_rc.correction.config import RolloutCorrectionConfig, Rules
from flowgrpo_rc.correction.thresholds import KEY


def why_recompute(
    correction: RolloutCorrectionConfig, rules: Rules, *, sees_rows: bool
) -> str | None:
    """Says why decoupled mode cannot take the first mini-batch's own forwards for its old policy.

    Those forwards come one after the other and after the advantages, so the correction of each
    piece has to follow from that piece alone. `sees_rows`: one forward evaluates all steps of a
    sample. None if nothing stands in the way.
    """
    criteria = (*rules.bands, *rules.auto)
    has_veto = rules.log_veto is not None
    masks = rules.level is not None and rules.bounds.mode == "mask"
    # Steps that are not finite need no forward: the rollout shows them.
    rejects = bool(criteria) or has_veto or masks
    judges_rows = has_veto or not all(band.per_step for band in criteria)
    needs_rows = judges_rows or not rules.per_step
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
            needs_rows and not sees_rows,
            "weights or criteria of sequences need all steps, and a forward sees one",
        ),
    )
    return next((reason for holds, reason in reasons if holds), None)
