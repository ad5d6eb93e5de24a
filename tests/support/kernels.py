"""Says what the kernels of this machine's processor can do."""

from __future__ import annotations

import pytest
import torch

from flowgrpo_rc.rollout.options.quantized import check_int8_products


def _int8_overflows() -> bool:
    try:
        check_int8_products(torch.device("cpu"))
    except ValueError:
        return True
    return False


needs_int8_kernels = pytest.mark.skipif(
    _int8_overflows(), reason="int8 products overflow on this processor, which runs refuse"
)
