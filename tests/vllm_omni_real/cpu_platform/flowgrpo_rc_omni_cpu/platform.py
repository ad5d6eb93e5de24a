"""vLLM's CPU platform with what the diffusion worker asks for besides."""

from __future__ import annotations

from typing import Any

import torch
from vllm.platforms.cpu import CpuPlatform
from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum


class CpuOmniPlatform(OmniPlatform, CpuPlatform):
    """One device without streams. Memory is whatever the process may have."""

    _omni_enum = OmniPlatformEnum.OOT
    device_type = "cpu"
    device_name = "cpu"
    dist_backend = "gloo"

    @classmethod
    def get_diffusion_attn_backend_cls(
        cls, selected_backend: str | None, head_size: int, allow_trtllm_default: bool = False
    ) -> str:
        if selected_backend not in (None, "TORCH_SDPA"):
            raise ValueError(
                f"attention backend {selected_backend!r} needs a GPU; a CPU has TORCH_SDPA"
            )
        return "flowgrpo_rc_omni_cpu.attention.CpuAttention"

    @classmethod
    def get_torch_device(cls, local_rank: int | None = None) -> torch.device:
        return torch.device("cpu")

    @classmethod
    def get_device_count(cls) -> int:
        return 1

    @classmethod
    def current_device(cls) -> int:
        return 0

    @classmethod
    def set_device(cls, device: torch.device) -> None: ...

    @classmethod
    def synchronize(cls) -> None: ...

    @classmethod
    def empty_cache(cls) -> None: ...

    @classmethod
    def reset_peak_memory_stats(cls, *args: Any, **named: Any) -> None: ...

    @classmethod
    def max_memory_reserved(cls, *args: Any, **named: Any) -> int:
        return 0

    @classmethod
    def max_memory_allocated(cls, *args: Any, **named: Any) -> int:
        return 0

    @classmethod
    def get_free_memory(cls, device: torch.device | None = None) -> int:
        return 1 << 33

    @classmethod
    def is_available(cls) -> bool:
        return False

    @classmethod
    def is_initialized(cls) -> bool:
        return False

    @classmethod
    def supports_torch_inductor(cls) -> bool:
        return False

    @classmethod
    def supports_cpu_offload(cls) -> bool:
        return False
