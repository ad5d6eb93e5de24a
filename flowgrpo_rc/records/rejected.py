"""A few rejected samples of every step, rows of rejected.jsonl: what, where, why, and numbers."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flowgrpo_rc.batch import Batch, Rewards
from flowgrpo_rc.correction.auto_bands import AutoBands
from flowgrpo_rc.correction.config import RolloutCorrectionConfig, Rules
from flowgrpo_rc.correction.reasons import Reason, reasons
from flowgrpo_rc.monitoring.decisions import Decision, worst_rejected
from flowgrpo_rc.records.metrics_file import Row, as_json
from flowgrpo_rc.records.samples import Shown

PER_STEP = 4  # samples of all processes together, but at least one of each
MOST_TEXT = 500  # characters of a prompt or a response


@dataclass(frozen=True)
class RejectedSamples:
    """Says which samples of a process were rejected, and why."""

    correction: RolloutCorrectionConfig
    rules: Rules  # the same, parsed
    num_processes: int

    def rows(
        self,
        decisions: list[Decision],
        batch: Batch,
        shown: Shown,
        rewards: Rewards,
        cell_names: Callable[[], Sequence[str]],
        auto_bands: AutoBands | None = None,
    ) -> list[Row]:
        """Returns this process's samples whose rejected steps differ most.

        A row holds prompt, text of a response, reward, timestep (or the position of a token),
        log_ratio there, and reasons (criterion, value, lower, upper). `cell_names` waits for the
        device, and is called only if needed.
        """
        worst = worst_rejected(decisions, max(1, PER_STEP // self.num_processes))
        position = {seed: index for index, seed in enumerate(batch.seed.tolist())}
        names = cell_names() if worst else ()
        rows = []
        for decision, decision_row in worst:
            seed = int(decision.seed[decision_row])
            index = position[seed]
            row: Row = {"reward": float(rewards.total[index])}
            row |= self._where(decision, decision_row, names)
            causes = self._reasons(decision, decision_row)
            moving = [] if auto_bands is None else auto_bands.reasons(seed)
            # Without their bounds they are named only if nothing else explains the rejection.
            if {reason.criterion for reason in causes} & {band.criterion for band in moving}:
                causes = moving
            row["reasons"] = [reason._asdict() for reason in causes]
            row["prompt"] = shown.prompts[index].text[:MOST_TEXT] if shown.prompts else None
            if shown.texts:
                row["text"] = shown.texts[index][:MOST_TEXT]
            rows.append(as_json(row))
        return rows

    def _where(self, decision: Decision, row: int, names: Sequence[str]) -> Row:
        """Returns the rejected step of a row that differs most, and its difference."""
        difference = decision.difference[row].cpu()
        rejected = decision.rejected[row].cpu()
        sizes = difference.abs().nan_to_num(nan=math.inf).where(rejected, -1.0)
        worst = int(sizes.argmax())
        name = names[int(decision.cells[row, worst])]
        place = {"timestep": int(name.removeprefix("ts_"))} if name else {"position": worst}
        return place | {"log_ratio": float(difference[worst])}

    def _reasons(self, decision: Decision, row: int) -> list[Reason]:
        correction = self.correction
        if correction.custom_correction is not None:
            return [Reason(str(correction.custom_correction), math.nan)]
        scale = decision.num_elements if correction.log_prob_scale == "sum" else 1
        training = decision.training_log_probs[row].cpu().double() * scale
        rollout = decision.rollout_log_probs[row].cpu().double() * scale
        rules = self.rules
        needs_kl = rules.needs_step_kl or any(band.estimator == "kl" for band in rules.auto)
        step_kl = decision.step_kl[row].cpu() if needs_kl and decision.step_kl is not None else None
        return reasons(training, rollout, decision.step_mask[row].cpu(), rules, step_kl=step_kl)
