"""Writes down what helps to look into an update that has failed."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from flowgrpo_rc.batch import Batch
from flowgrpo_rc.files import write_atomic

_COLUMNS = (
    "seed",
    "policy_version",
    "advantages",
    "rollout_log_probs",
    "old_log_probs",
    "rejection_mask",
)


def write_bundle(
    path: Path, step: int, batch: Batch, tensors: Mapping[str, Mapping[str, Tensor]]
) -> None:
    """Writes the samples that an update was given, and the size of what it has left, as JSON.

    A number that is not finite becomes a text: "nan", "inf" or "-inf".

    Args:
      path: the file; its folder is made.
      step: the training step.
      batch: the samples of this process, with advantages.
      tensors: stem -> name -> weight, moment or average.
    """
    content = {
        "step": step,
        "samples": {"slot": _plain(batch.group)}
        | {name: _plain(getattr(batch, name)) for name in _COLUMNS},
        "norms": {
            f"{stem}/{name}": _number(float(tensor.double().norm()))
            for stem, group in tensors.items()
            for name, tensor in group.items()
        },
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps(content, indent=1).encode())


def _plain(column: Tensor | None) -> Any:
    """Returns a tensor as nested lists that JSON can hold."""
    if column is None:
        return None
    if column.ndim > 1:
        return [_plain(row) for row in column]
    return [_number(value) for value in column.tolist()]


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
