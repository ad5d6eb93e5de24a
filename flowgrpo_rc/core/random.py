"""Counter-based randomness: a draw is a function of (run seed, step, prompt, sample, purpose) and
of nothing else.

No generator lives across draws, so a resumed run repeats an uninterrupted one bit for bit, and a
draw does not depend on how samples are batched or on the number of processes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from integers and strings; different parts give independent seeds (SHA-256)."""
    digest = hashlib.sha256(
        "\x1f".join(f"{type(part).__name__}:{part}" for part in parts).encode()
    ).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def generator(*parts: int | str) -> torch.Generator:
    """A CPU generator for one draw. CPU, so that the same numbers come out whatever the device."""
    return torch.Generator("cpu").manual_seed(derive_seed(*parts))


def normal(shape: Sequence[int], seeds: Sequence[int], *purpose: int | str) -> Tensor:
    """Standard normal [len(seeds), *shape] in fp32 on the CPU; row i depends on seeds[i] and
    purpose alone.
    """
    return torch.stack(
        [torch.randn(tuple(shape), generator=generator(seed, *purpose)) for seed in seeds]
    )


def uniform(shape: Sequence[int], seeds: Sequence[int], *purpose: int | str) -> Tensor:
    """Uniform in [0, 1), [len(seeds), *shape] in float64 on the CPU; row i depends on seeds[i] and
    purpose alone.
    """
    rows = [
        torch.rand(tuple(shape), generator=generator(seed, *purpose), dtype=torch.float64)
        for seed in seeds
    ]
    return torch.stack(rows)
