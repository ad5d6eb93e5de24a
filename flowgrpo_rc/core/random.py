"""Counter-based randomness: a draw follows from (run seed, step, prompt, sample, purpose) alone.

No generator lives from one draw to the next. So a resumed run repeats an uninterrupted one bit for
bit, and a draw depends neither on how samples are batched nor on the number of processes.
"""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor


def derive_seed(*parts: int | str) -> int:
    """Returns the first 63 bits of a SHA-256 hash of what a draw is for.

    Other values, another order or another type (1 and "1") give an independent seed.
    """
    # The type and a separator that no text contains keep (1, "2") and ("1", 2) and (12,) apart.
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    digest = hashlib.sha256(text.encode()).digest()
    # 63 bits: torch takes a signed 64-bit seed.
    return int.from_bytes(digest[:8], "big") >> 1


def generator(*parts: int | str) -> torch.Generator:
    """Returns a fresh generator of the CPU, so that every device gets the same numbers."""
    return torch.Generator("cpu").manual_seed(derive_seed(*parts))


def normal(shape: Sequence[int], seeds: Sequence[int], *purpose: int | str) -> Tensor:
    """Draws standard normal noise [len(seeds), *shape], fp32 on the CPU.

    Row i depends on seeds[i] and the purpose, as `derive_seed` takes it, alone.
    """
    # Row by row: one draw of all rows would depend on how many there are.
    rows = [torch.randn(tuple(shape), generator=generator(seed, *purpose)) for seed in seeds]
    return torch.stack(rows)


def uniform(shape: Sequence[int], seeds: Sequence[int], *purpose: int | str) -> Tensor:
    """Draws numbers that are uniform in [0, 1), float64 on the CPU, by row as `normal` does."""
    rows = [
        torch.rand(tuple(shape), generator=generator(seed, *purpose), dtype=torch.float64)
        for seed in seeds
    ]
    return torch.stack(rows)
