"""The device that a run uses. It is asked for before any library of models is imported."""

from __future__ import annotations

import torch

from flowgrpo_rc.config.tree import Config


def device_of(config: Config) -> torch.device:
    """Returns the kind of device that a run would use: the GPU, or the CPU if there is no CUDA or
    `trainer.device=cpu` asks for it.

    Other accelerators are left alone: Apple's has no float64, which the metrics need.

    Raises:
      ValueError: `trainer.device=cuda`, and there is no CUDA.
    """
    has_cuda = torch.cuda.is_available()
    if config.trainer.device == "cuda" and not has_cuda:
        built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU alone"
        raise ValueError(
            f"trainer.device=cuda: torch {torch.__version__} is built for {built} and sees no GPU; "
            "install the driver or a torch for CUDA, or set trainer.device=auto (the CPU if there "
            "is no GPU) or cpu"
        )
    on_cpu = config.trainer.device == "cpu" or not has_cuda
    return torch.device("cpu" if on_cpu else "cuda")
