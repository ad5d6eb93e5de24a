"""Batches of earlier iterations, which `rollout.reuse` trains on again."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from flowgrpo_rc.batch import Batch
from flowgrpo_rc.records.checkpoint import OF_PROCESS, cannot_write
from flowgrpo_rc.records.packed_batch import PackedBatch, pack, unpack

_HEADERS = "headers"


class EarlierBatches:
    """Holds this process's newest batches, as they were when they were new.

    They stay on the device, packed as a checkpoint gives them back. So a resumed run computes on
    tensors of the same layout, and ends with the same bits.
    """

    def __init__(self, limit: int) -> None:
        """Starts without a batch.

        Args:
          limit: how many are held, `rollout.reuse`.
        """
        self.limit = limit
        self._newest_first: deque[PackedBatch] = deque(maxlen=limit)

    def add(self, batch: Batch, advantages: Tensor | None, rejection_mask: Tensor | None) -> None:
        """Takes in the newest batch; the oldest goes if there are too many.

        Args:
          batch: the samples as they came, without an old policy and a correction.
          advantages: what the batch was trained with, [B, T].
          rejection_mask: bool, [B, T]; False where a step is to stay rejected. None for nowhere.
        """
        batch = batch.replace(advantages=advantages, rejection_mask=rejection_mask)
        self._newest_first.appendleft(pack(batch))

    def newest_first(self) -> list[Batch]:
        """Returns the batches."""
        return [unpack(packed) for packed in self._newest_first]

    def save(self, folder: Path, rank: int, count: int) -> list[Path]:
        """Writes this process's batches to a file.

        Args:
          folder: where all processes write.
          rank: number of the process.
          count: number of processes.

        Returns:
          The files of all processes; none if there is no batch.

        Raises:
          CheckpointError: the disk refuses.
        """
        if not self._newest_first:
            return []
        # Copies, since batches can share a tensor, such as the schedule, and a file cannot.
        tensors = {
            f"{age}/{name}": tensor.to("cpu", copy=True)
            for age, packed in enumerate(self._newest_first)
            for name, tensor in packed.tensors.items()
        }
        headers = json.dumps([packed.header for packed in self._newest_first], sort_keys=True)
        path = folder / _file_name(rank, count)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            save_file(tensors, path, metadata={_HEADERS: headers})
        # Every exception, since safetensors has a type of its own for a full disk.
        except Exception as error:
            raise cannot_write(path, error) from error
        return [folder / _file_name(process, count) for process in range(count)]

    def load(self, files: Sequence[Path], rank: int, device: torch.device) -> None:
        """Goes back to what `save` wrote, bit for bit.

        Args:
          files: the files of all processes, as many as there are now; none for no batch.
          rank: number of the process.
          device: where the batches go.
        """
        if not files:
            return
        wanted = _file_name(rank, len(files))
        (path,) = (path for path in files if path.name == wanted)
        with safe_open(path, framework="pt") as file:
            headers = json.loads(file.metadata()[_HEADERS])
            names = file.keys()  # the file is no mapping, so it cannot be iterated itself
            tensors = {name: file.get_tensor(name).to(device) for name in names}
        for age, header in enumerate(headers):
            own = {
                name.removeprefix(f"{age}/"): tensor
                for name, tensor in tensors.items()
                if name.startswith(f"{age}/")
            }
            self._newest_first.append(PackedBatch(header, own))


def check_processes(files: Sequence[Path], count: int) -> None:
    """Checks that the batches of a checkpoint are those of as many processes as go on.

    Args:
      files: the files of all processes; none for no batch.
      count: number of processes.

    Raises:
      ValueError: names both numbers.
    """
    if files and len(files) != count:
        raise ValueError(
            f"{files[0].parent} holds the earlier batches (rollout.reuse) of {len(files)} "
            f"process(es), and {count} would go on: start as many as before"
        )


def _file_name(rank: int, count: int) -> str:
    return f"{OF_PROCESS}{rank}_of_{count}.safetensors"
