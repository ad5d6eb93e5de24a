"""The device that a run uses. It is asked for before any library of models is imported."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from flowgrpo_rc.config.tree import Config

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


def device_of(config: Config) -> torch.device:
    """Returns the kind of device that a run would use: the GPU, or the CPU if there is no CUDA or
    `trainer.device=cpu` asks for it.

    Other accelerators are left alone: Apple's has no float64, which the metrics need.

    Raises:
      ValueError: `trainer.device=cuda`, and there is no CUDA; or `auto`, and the machine has an
        NVIDIA driver that torch cannot use.
    """
    has_cuda = torch.cuda.is_available()
    asked = config.trainer.device
    if has_cuda or asked == "cpu":
        return torch.device("cuda" if has_cuda and asked != "cpu" else "cpu")
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU alone"
    found = (
        f"trainer.device={asked}: torch {torch.__version__} is built for {built} and sees no GPU"
    )
    if asked == "cuda":
        raise ValueError(
            f"{found}; install the driver or a torch for CUDA, or set trainer.device=auto (the CPU "
            "if there is no GPU) or cpu"
        )
    # A driver that is too old for this torch looks the same as no GPU.
    if NVIDIA_DRIVER.is_file() and os.environ.get("CUDA_VISIBLE_DEVICES") != "":
        raise ValueError(
            f"{found}, though this machine has an NVIDIA driver; install a newer driver or a torch "
            "for this one (docs/troubleshooting.md#the-gpu-is-not-used), or set trainer.device=cpu"
        )
    return torch.device("cpu")
