"""Says what the kernels of this machine's processor can do."""

from __future__ import annotations

import pytest
import torch

from flowgrpo_rc.rollout.options.quantized import check_int8_products

# Elsewhere torch multiplies bf16 with other kernels, whose noise is too small or has other tails.
needs_bf16_kernels = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "AVX2"),
    reason="what it expects was measured with the bf16 kernels of processors with AVX-512",
)


def _int8_overflows() -> bool:
    try:
        check_int8_products(torch.device("cpu"))
    except ValueError:
        return True
    return False


needs_int8_kernels = pytest.mark.skipif(
    _int8_overflows(), reason="int8 products overflow on this processor, which runs refuse"
)
