"""A few rejected samples of every step for people to look at: picture or text, and the reasons.

Each process writes its own samples, so nothing travels between processes. Number and size of what
is kept are bounded.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from flowgrpo_rc.batch import Batch, Rewards
from flowgrpo_rc.correction.auto_bands import AutoBands
from flowgrpo_rc.correction.config import RolloutCorrectionConfig
from flowgrpo_rc.correction.reasons import Reason, reasons
from flowgrpo_rc.files import write_atomic
from flowgrpo_rc.monitoring.decisions import Decision, worst_rejected
from flowgrpo_rc.records.samples import Shown, image_grid

PER_STEP = 4  # samples of all processes together, but at least one of each
STEPS_KEPT = 50  # files of each process; older ones are deleted
MOST_TEXT = 500  # characters of a prompt or a response


class RejectedSamples:
    """Writes `step_N_process_R_of_C.json` into a folder, and pictures beside it.

    A row of a file holds step, prompt, reward, timestep (or the position of a token), log_ratio
    there, reasons (criterion, value, lower, upper), and text or picture (the name of its file).

    Args:
      folder: the folder of all steps.
      correction: the rules that rejected the samples.
      rank: number of this process.
      count: number of processes.
    """

    def __init__(
        self, folder: Path, correction: RolloutCorrectionConfig, *, rank: int, count: int
    ) -> None:
        self._folder = folder
        self._correction = correction
        self._rank = rank
        self._count = count

    def write(
        self,
        step: int,
        decisions: list[Decision],
        batch: Batch,
        shown: Shown,
        rewards: Rewards,
        cell_names: Callable[[], Sequence[str]],
        auto_bands: AutoBands | None = None,
    ) -> Image.Image | None:
        """Writes this process's samples whose rejected steps differ most, and pictures them.

        Args:
          step: the training step.
          decisions: what the correction decided in it.
          batch: all of this process's samples of the step.
          shown: what people may see of these samples, in the same order.
          rewards: their rewards, in the same order.
          cell_names: returns the names of the policy's cells; called only if needed.
          auto_bands: the `auto` criteria, which know the bounds that they had; None for none.

        Returns:
          A grid of the samples; None if nothing was rejected or nothing can be shown.
        """
        chosen = worst_rejected(decisions, max(1, PER_STEP // self._count))
        if not chosen:
            return None
        position = {seed: index for index, seed in enumerate(batch.seed.tolist())}
        names = cell_names()
        stem = f"step_{step:06d}_process_{self._rank}_of_{self._count}"
        self._folder.mkdir(parents=True, exist_ok=True)
        rows = []
        pictures = {}
        for number, (decision, row) in enumerate(chosen):
            index = position[int(decision.seed[row])]
            reward = _finite(float(rewards.total[index]))
            known: dict[str, Any] = {"step": step, "reward": reward}
            known |= self._decision(decision, row, names)
            moving = [] if auto_bands is None else auto_bands.reasons(int(decision.seed[row]))
            # Without their bounds they are named only if nothing else explains the rejection.
            if {one["criterion"] for one in known["reasons"]} & {one.criterion for one in moving}:
                known["reasons"] = [_written(reason) for reason in moving]
            known["prompt"] = shown.prompts[index].text[:MOST_TEXT] if shown.prompts else None
            sample = shown.samples[index] if shown.samples else None
            if isinstance(sample, str):
                known["text"] = sample[:MOST_TEXT]
            elif sample is not None:
                known["picture"] = f"{stem}_{number}.png"
                pictures[number] = sample
                write_atomic(self._folder / known["picture"], _png(sample))
            rows.append(known)
        write_atomic(
            self._folder / f"{stem}.json", json.dumps(rows, ensure_ascii=False, indent=1).encode()
        )
        self._forget_old()
        captions = [", ".join(map(in_words, rows[number]["reasons"])) for number in pictures]
        return image_grid(np.stack(list(pictures.values())), captions) if pictures else None

    def _decision(self, decision: Decision, row: int, names: Sequence[str]) -> dict[str, Any]:
        """Tells where the row's largest rejected difference is, and why the row was rejected."""
        difference = decision.difference[row].cpu()
        rejected = decision.rejected[row].cpu()
        sizes = difference.abs().nan_to_num(nan=math.inf).where(rejected, -1.0)
        worst = int(sizes.argmax())
        name = names[int(decision.cells[row, worst])]
        where = {"timestep": int(name.removeprefix("ts_"))} if name else {"position": worst}
        found = [_written(reason) for reason in self._reasons(decision, row)]
        return where | {"log_ratio": _finite(float(difference[worst])), "reasons": found}

    def _reasons(self, decision: Decision, row: int) -> list[Reason]:
        correction = self._correction
        if correction.custom_correction is not None:
            return [Reason(str(correction.custom_correction), math.nan)]
        scale = decision.num_elements if correction.log_prob_scale == "sum" else 1
        training = _row(decision.training_log_probs, row).double() * scale
        rollout = _row(decision.rollout_log_probs, row).double() * scale
        rules = correction.rules()
        needs_kl = rules.needs_step_kl or any(band.estimator == "kl" for band in rules.auto)
        step_kl = None
        if decision.step_kl is not None and needs_kl:
            step_kl = _row(decision.step_kl, row)
        return reasons(training, rollout, _row(decision.step_mask, row), rules, step_kl=step_kl)

    def _forget_old(self) -> None:
        own = sorted(self._folder.glob(f"step_*_process_{self._rank}_of_*.json"))
        for path in own[:-STEPS_KEPT]:
            # The rows go first, so that no reader looks for pictures that are gone.
            path.unlink()
            for picture in self._folder.glob(f"{path.stem}_*.png"):
                picture.unlink()


def read_rejected(folder: Path) -> list[dict[str, Any]]:
    """Returns the rows of all processes, by step."""
    rows = [
        row
        for path in sorted(folder.glob("step_*.json"))
        for row in json.loads(path.read_text(encoding="utf-8"))
    ]
    return sorted(rows, key=lambda row: row["step"])


def drop_rejected_after(folder: Path, step: int) -> None:
    """Deletes samples of steps that a resumed run repeats."""
    for path in folder.glob("step_*"):
        if int(path.name.split("_")[1]) > step:
            path.unlink()


def in_words(reason: Mapping[str, Any]) -> str:
    """Returns a reason in words: `seq_mean_k1: 1.00031, outside 0.9998 to 1.0002`."""
    value = reason.get("value")
    lower = reason.get("lower")
    upper = reason.get("upper")
    if value is None:
        return str(reason["criterion"])
    text = f"{reason['criterion']}: {value:.7g}"
    if lower is not None and upper is not None:
        return f"{text}, outside {lower:.7g} to {upper:.7g}"
    if upper is not None:
        return f"{text}, above {upper:.7g}"
    return f"{text}, below {lower:.7g}" if lower is not None else text


def _row(values: Tensor, row: int) -> Tensor:
    return values[row].cpu()


def _written(reason: Reason) -> dict[str, float | str | None]:
    return {
        name: value if isinstance(value, str) else _finite(value)
        for name, value in reason._asdict().items()
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _png(sample: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(sample).save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()
