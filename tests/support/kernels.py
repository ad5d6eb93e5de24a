"""Says what the kernels of this machine's processor can do."""

from __future__ import annotations

import pytest
import torch

# Elsewhere torch multiplies bf16 with other kernels, whose noise is too small or has other tails.
needs_bf16_kernels = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "AVX2"),
    reason="what it expects was measured with the bf16 kernels of processors with AVX-512",
)
