"""A few rejected samples of every step, as people can look at them: picture or text, criterion,
value, step.

Each process writes what it made itself, so that nothing travels. What is kept is bounded in number
and size.
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
from flowgrpo_rc.correction.config import RolloutCorrectionConfig
from flowgrpo_rc.correction.reasons import Reason, reasons
from flowgrpo_rc.files import write_atomic
from flowgrpo_rc.monitoring.decisions import Decision, worst_rejected
from flowgrpo_rc.records.samples import Shown, image_grid

PER_STEP = 4  # of all processes together, and at least one of each
STEPS_KEPT = 50  # of each process; older ones are deleted
MOST_TEXT = 500  # characters of a prompt or a response


class RejectedSamples:
    """Writes `step_N_process_R_of_C.json` and pictures beside it into `folder`.

    A row holds step, prompt, reward, timestep (or the position of a token), log_ratio there,
    reasons (criterion, value, lower, upper), and text or picture (its file name).
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
        seen: list[Decision],
        batch: Batch,
        shown: Shown,
        rewards: Rewards,
        cell_names: Callable[[], Sequence[str]],
    ) -> Image.Image | None:
        """Write down the samples of this process whose rejected steps differ the most; returns a
        picture of them.

        batch, shown, rewards: all of this process's samples of the step, in one order; cell_names:
        those of the policy, asked for only if something was rejected.
        """
        chosen = worst_rejected(seen, max(1, PER_STEP // self._count))
        if not chosen:
            return None
        position = {seed: index for index, seed in enumerate(batch.seed.tolist())}
        names = cell_names()
        stem = f"step_{step:06d}_process_{self._rank}_of_{self._count}"
        self._folder.mkdir(parents=True, exist_ok=True)
        rows = []
        pictures = {}
        for number, (one, row) in enumerate(chosen):
            index = position[int(one.seed[row])]
            known = {"step": step, "reward": _finite(float(rewards.total[index]))} | self._decision(
                one, row, names
            )
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

    def _decision(self, one: Decision, row: int, names: Sequence[str]) -> dict[str, Any]:
        """Where the row's largest rejected difference is, and why the row was rejected."""
        difference = one.difference[row].cpu()
        rejected = one.rejected[row].cpu()
        sizes = difference.abs().nan_to_num(nan=math.inf).where(rejected, -1.0)
        worst = int(sizes.argmax())
        name = names[int(one.cells[row, worst])]
        where = {"timestep": int(name.removeprefix("ts_"))} if name else {"position": worst}
        found = [_written(reason) for reason in self._reasons(one, row)]
        return where | {"log_ratio": _finite(float(difference[worst])), "reasons": found}

    def _reasons(self, one: Decision, row: int) -> list[Reason]:
        correction = self._correction
        if correction.custom_correction is not None:
            return [Reason(str(correction.custom_correction), math.nan)]
        scale = one.num_elements if correction.log_prob_scale == "sum" else 1
        training, rollout = (
            _row(log_probs, row).double() * scale for log_probs in (one.training, one.rollout)
        )
        rules = correction.rules()
        needs_kl = rules.needs_step_kl or any(band.estimator == "kl" for band in rules.auto)
        step_kl = _row(one.step_kl, row) if one.step_kl is not None and needs_kl else None
        return reasons(training, rollout, _row(one.valid, row), rules, step_kl=step_kl)

    def _forget_old(self) -> None:
        for path in sorted(self._folder.glob(f"step_*_process_{self._rank}_of_*.json"))[
            :-STEPS_KEPT
        ]:
            path.unlink()  # first, so that nobody reads of pictures that are gone
            for picture in self._folder.glob(f"{path.stem}_*.png"):
                picture.unlink()


def read_rejected(folder: Path) -> list[dict[str, Any]]:
    """The rows of all processes, by step."""
    rows = [
        row
        for path in sorted(folder.glob("step_*.json"))
        for row in json.loads(path.read_text(encoding="utf-8"))
    ]
    return sorted(rows, key=lambda row: row["step"])


def drop_rejected_after(folder: Path, step: int) -> None:
    """Of steps that will be done again."""
    for path in folder.glob("step_*"):
        if int(path.name.split("_")[1]) > step:
            path.unlink()


def in_words(reason: Mapping[str, Any]) -> str:
    """Such as `seq_mean_k1: 1.00031, outside 0.9998 to 1.0002`."""
    value, lower, upper = (reason.get(name) for name in ("value", "lower", "upper"))
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
