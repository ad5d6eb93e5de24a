"""Writes down what helps to look into an update that has failed."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from flowgrpo_rc.batch import Batch
from flowgrpo_rc.files import write_atomic

_COLUMNS = "seed policy_version advantages rollout_log_probs old_log_probs rejection_mask"


def write_bundle(
    path: Path, step: int, batch: Batch, tensors: Mapping[str, Mapping[str, Tensor]]
) -> None:
    """Writes the samples that an update was given, and the norms of what it has left, as JSON.

    A number that is not finite becomes a text: "nan", "inf" or "-inf".
    """
    content = {
        "step": step,
        "samples": {"slot": _plain(batch.group)}
        | {name: _plain(getattr(batch, name)) for name in _COLUMNS.split()},
        "norms": {
            f"{stem}/{name}": _plain(tensor.double().norm())
            for stem, group in tensors.items()
            for name, tensor in group.items()
        },
    }
    write_atomic(path, json.dumps(content, indent=1).encode())


def _plain(column: Tensor | None) -> object:
    return None if column is None else _finite(column.tolist())


def _finite(value: Any) -> object:
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value if math.isfinite(value) else str(value)
