"""A few rejected samples of every step for people to look at: what, where, why, and numbers.

They are rows of rejected.jsonl; small pictures lie in rejected/. Number and size are bounded.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowgrpo_rc.batch import Batch, Rewards
from flowgrpo_rc.correction.auto_bands import AutoBands
from flowgrpo_rc.correction.config import RolloutCorrectionConfig
from flowgrpo_rc.correction.reasons import Reason, reasons
from flowgrpo_rc.files import write_atomic
from flowgrpo_rc.monitoring.decisions import Decision, worst_rejected
from flowgrpo_rc.records.metrics_file import as_json
from flowgrpo_rc.records.samples import Shown, png_bytes

PER_STEP = 4  # samples of all processes together, but at least one of each
PICTURES_KEPT = 200  # of each process; older ones are deleted
MOST_TEXT = 500  # characters of a prompt or a response


@dataclass(frozen=True)
class RejectedSamples:
    """Says which samples of a process were rejected, and why."""

    folder: Path  # of pictures
    correction: RolloutCorrectionConfig
    rank: int  # of this process
    count: int  # of processes

    def rows(
        self,
        step: int,
        decisions: list[Decision],
        batch: Batch,
        shown: Shown,
        rewards: Rewards,
        cell_names: Callable[[], Sequence[str]],
        auto_bands: AutoBands | None = None,
    ) -> list[dict[str, Any]]:
        """Returns this process's samples whose rejected steps differ most; writes their pictures.

        A row holds prompt, reward, timestep (or the position of a token), log_ratio there, reasons
        (criterion, value, lower, upper), and text or picture (the name of a file in `folder`).
        `cell_names` waits for the device, and is called only if needed.
        """
        chosen = worst_rejected(decisions, max(1, PER_STEP // self.count))
        position = {seed: index for index, seed in enumerate(batch.seed.tolist())}
        names = cell_names() if chosen else ()
        rows = []
        for number, (decision, row) in enumerate(chosen):
            index = position[int(decision.seed[row])]
            known: dict[str, Any] = {"reward": float(rewards.total[index])}
            known |= self._decision(decision, row, names)
            moving = [] if auto_bands is None else auto_bands.reasons(int(decision.seed[row]))
            # Without their bounds they are named only if nothing else explains the rejection.
            if {one["criterion"] for one in known["reasons"]} & {one.criterion for one in moving}:
                known["reasons"] = [reason._asdict() for reason in moving]
            known["prompt"] = shown.prompts[index].text[:MOST_TEXT] if shown.prompts else None
            sample = shown.samples[index] if shown.samples else None
            if isinstance(sample, str):
                known["text"] = sample[:MOST_TEXT]
            elif sample is not None:
                known["picture"] = f"step_{step:06d}_process_{self.rank}_{number}.png"
                write_atomic(self.folder / known["picture"], png_bytes(sample))
            rows.append(as_json(known))
        for old in sorted(self.folder.glob(f"*_process_{self.rank}_*.png"))[:-PICTURES_KEPT]:
            old.unlink()
        return rows

    def _decision(self, decision: Decision, row: int, names: Sequence[str]) -> dict[str, Any]:
        difference = decision.difference[row].cpu()
        rejected = decision.rejected[row].cpu()
        sizes = difference.abs().nan_to_num(nan=math.inf).where(rejected, -1.0)
        worst = int(sizes.argmax())
        name = names[int(decision.cells[row, worst])]
        where = {"timestep": int(name.removeprefix("ts_"))} if name else {"position": worst}
        found = [reason._asdict() for reason in self._reasons(decision, row)]
        return where | {"log_ratio": float(difference[worst]), "reasons": found}

    def _reasons(self, decision: Decision, row: int) -> list[Reason]:
        correction = self.correction
        if correction.custom_correction is not None:
            return [Reason(str(correction.custom_correction), math.nan)]
        scale = decision.num_elements if correction.log_prob_scale == "sum" else 1
        training = decision.training_log_probs[row].cpu().double() * scale
        rollout = decision.rollout_log_probs[row].cpu().double() * scale
        rules = correction.rules()
        needs_kl = rules.needs_step_kl or any(band.estimator == "kl" for band in rules.auto)
        step_kl = decision.step_kl[row].cpu() if needs_kl and decision.step_kl is not None else None
        return reasons(training, rollout, decision.step_mask[row].cpu(), rules, step_kl=step_kl)


def in_words(reason: Mapping[str, Any]) -> str:
    """Returns a reason in words: `seq_mean_k1: 1.00031, outside 0.9998 to 1.0002`."""
    text = str(reason["criterion"])
    value, lower, upper = (reason.get(name) for name in ("value", "lower", "upper"))
    if value is not None:
        text += f": {value:.7g}"
    if lower is not None and upper is not None:
        return f"{text}, outside {lower:.7g} to {upper:.7g}"
    if upper is not None:
        return f"{text}, above {upper:.7g}"
    return f"{text}, below {lower:.7g}" if lower is not None else text
