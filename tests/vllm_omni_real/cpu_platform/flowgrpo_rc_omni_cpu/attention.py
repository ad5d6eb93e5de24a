"""torch's attention for the CPU: vLLM-Omni's own chooses its code by platform and knows no CPU."""

from __future__ import annotations

from typing import Any

import torch
from vllm_omni.diffusion.attention.backends.sdpa import SDPABackend, SDPAImpl


class CpuAttentionImpl(SDPAImpl):
    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_metadata: Any = None
    ) -> torch.Tensor:
        return self._forward_impl(query, key, value, attn_metadata)


class CpuAttention(SDPABackend):
    @staticmethod
    def get_impl_cls() -> type[CpuAttentionImpl]:
        return CpuAttentionImpl
