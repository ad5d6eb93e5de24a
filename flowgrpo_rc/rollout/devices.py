"""Which GPU an engine in a process of its own may see."""

from __future__ import annotations

import os

import torch


def visible_device(device: torch.device) -> str:
    """The trainer's GPU in the words of CUDA_VISIBLE_DEVICES."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = (
        before.split(",") if before else [str(index) for index in range(torch.cuda.device_count())]
    )
    return visible[device.index or 0]
