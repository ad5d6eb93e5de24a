"""The GPU that an engine in a process of its own may see."""

from __future__ import annotations

import os

import torch


def visible_device(device: torch.device) -> str:
    """Returns the trainer's GPU in the words of CUDA_VISIBLE_DEVICES."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    if before:
        visible = before.split(",")
    else:
        visible = [str(index) for index in range(torch.cuda.device_count())]
    return visible[device.index or 0]
