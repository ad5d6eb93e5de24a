"""vLLM-Omni asks for its platform here; the answer is a class on a machine where vLLM itself runs
on the CPU.
"""

from __future__ import annotations


def platform() -> str | None:
    from vllm.platforms import current_platform

    return "flowgrpo_rc_omni_cpu.platform.CpuOmniPlatform" if current_platform.is_cpu() else None
