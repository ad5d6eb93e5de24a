"""Reuse of a transformer's middle blocks: what they added to the state at an earlier step.

The residual of the middle blocks changes slowly from one denoising step to the next. On a cached
step they are not evaluated, and their residual of the last step that was is added again:

    y_t = x_t + (y_s - x_s)

x and y are the states before and after them, s < t steps of the schedule. See "Δ-DiT",
https://arxiv.org/abs/2406.01125. The hooks of diffusers 0.42 for this purpose do not know the
blocks of SD3, and choose their steps by themselves.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flowgrpo_rc.models.networks import transformers

# The module lists that a transformer of diffusers may keep its blocks in, in the order of the walk.
LISTS = ("transformer_blocks", "single_transformer_blocks", "blocks", "layers")
ENCODED = "encoder_hidden_states"


class BlockCache:
    """Skips all blocks but the first and the last of each transformer on the steps that it is told.

    The network is changed in place and samples one batch at a time. Every list of blocks has a
    residual of its own, so that a transformer may do what it likes between two lists.

    Args:
      network: a transformer, or several; each has its blocks in lists of the names `LISTS`.
    """

    def __init__(self, network: nn.Module) -> None:
        self.skips = False  # whether the present step is a cached one
        # Which row of the transformer stands for each sample, and the first sample of each row;
        # None for one row each.
        self.place: Tensor | None = None
        self.rows: Tensor | None = None
        self.evaluations = 0  # of blocks, one for each row of a forward, the skipped included
        self.skipped = 0
        self._steps: frozenset[int] = frozenset()
        self._index = 0
        self._stretches: list[_Stretch] = []
        for transformer in transformers(network).values():
            uncounted = num_blocks(transformer)  # by its first stretch, which every forward enters
            for blocks, middle in middle_blocks(transformer):
                stretch = _Stretch(self, uncounted, len(middle))
                self._stretches.append(stretch)
                uncounted = 0
                for place in middle:
                    blocks[place] = _CachedBlock(blocks[place], stretch, place - middle.start)

    def start(self, steps: Sequence[int]) -> None:
        """Begins to count a walk, whose evaluations `steps` are cached ones."""
        self.end()  # an earlier walk may have ended with an error
        self._steps = frozenset(steps)
        self._index = -1
        self.evaluations = self.skipped = 0

    def end(self) -> None:
        """Forgets the states and residuals of a walk."""
        self.place = self.rows = None
        for stretch in self._stretches:
            stretch.forget()

    def next_step(self) -> None:
        """Goes to the next evaluation of the walk."""
        self._index += 1
        self.skips = self._index in self._steps
        for stretch in self._stretches:
            stretch.calls = 0


def middle_blocks(transformer: nn.Module) -> list[tuple[nn.ModuleList, range]]:
    """Returns the lists of a transformer's blocks, each with the places of those to skip.

    ValueError if nothing is left between the first and the last, or if there is no such list.
    """
    lists = _lists(transformer)
    total = num_blocks(transformer)
    if total < 3:
        name = type(transformer).__name__
        number = f"has {total} blocks" if total else f"keeps its blocks in none of {LISTS}"
        raise ValueError(
            f"rollout.cache.every has nothing to reuse between the first block and the last: a "
            f"{name} {number}; set it to 1"
        )
    middle = []
    before = 0
    for blocks in lists:
        first = max(1 - before, 0)
        last = min(total - 1 - before, len(blocks))
        before += len(blocks)
        if first < last:
            middle.append((blocks, range(first, last)))
    return middle


def num_blocks(transformer: nn.Module) -> int:
    """Returns how many blocks a transformer has."""
    return sum(map(len, _lists(transformer)))


def _lists(transformer: nn.Module) -> list[nn.ModuleList]:
    return [getattr(transformer, name) for name in LISTS if hasattr(transformer, name)]


def saved_share(network: nn.Module, cached: int, steps: int) -> float:
    """Returns the share of a sample's block evaluations that `cached` of `steps` steps save."""
    networks = transformers(network).values()
    middle = sum(len(places) for network in networks for _, places in middle_blocks(network))
    return middle / sum(map(num_blocks, networks)) * cached / steps


class _Stretch:
    """The middle blocks of one list, and what they added at the last step that evaluated them.

    States are those of the image and, where a block returns a pair, of the text.
    """

    def __init__(self, cache: BlockCache, num_blocks: int, num_middle: int) -> None:
        self.cache = cache
        self.num_blocks = num_blocks
        self.num_middle = num_middle
        self.calls = 0  # at the present step; guidance may take two
        # Number of the call -> residuals of its states, and `BlockCache.place` then.
        self.stored: dict[int, tuple[list[Tensor], Tensor | None]] = {}
        self.now: list[Tensor] | None = None  # where the blocks are skipped, the states behind them
        self._before: list[Tensor] = []  # the states before the first block
        self._after: list[Tensor] = []  # the states behind the one that was evaluated last

    def forget(self) -> None:
        """Holds no tensors until the next walk."""
        self.stored = {}
        self.now = None
        self._before = self._after = []

    def enter(self, states: list[Tensor]) -> None:
        """Decides at the first block whether this call skips them all."""
        self.calls += 1
        added = self._added(states) if self.cache.skips else None
        rows = len(states[0])
        self.cache.evaluations += rows * self.num_blocks
        self._before = self._after = states
        self.now = None
        if added is not None:
            self.cache.skipped += rows * self.num_middle
            self.now = [state + part for state, part in zip(states, added, strict=False)]

    def behind(self, place: int, before: list[Tensor], states: list[Tensor]) -> None:
        """Takes what a block made of the states before it; keeps what all have added."""
        if any(old is not new for old, new in zip(before, self._after, strict=False)):
            raise ValueError(
                "rollout.cache: this model changes the states between two of its blocks, so that "
                "they cannot be skipped together: set rollout.cache.every=1"
            )
        self._after = states
        if place == self.num_middle - 1:
            pairs = zip(states, self._before, strict=False)
            self.stored[self.calls] = [after - before for after, before in pairs], self.cache.place
            self._before = self._after = []

    def _added(self, states: list[Tensor]) -> list[Tensor] | None:
        """Returns the residuals of this call's rows; None if the last evaluation had others."""
        if self.calls not in self.stored:
            return None
        residuals, place = self.stored[self.calls]
        rows = self.cache.rows
        if place is not None and rows is not None:
            # A prompt's samples may have been one row then. Guidance may join two batches.
            branches = len(states[0]) // len(rows)
            size = len(residuals[0]) // branches
            index = torch.cat([place[rows] + branch * size for branch in range(branches)])
            residuals = [part[index] for part in residuals]
        pairs = zip(residuals, states, strict=False)
        return residuals if all(part.shape == state.shape for part, state in pairs) else None


class _CachedBlock(nn.Module):
    """A block that is skipped together with its neighbours."""

    def __init__(self, block: nn.Module, stretch: _Stretch, place: int) -> None:
        super().__init__()
        self.block = block
        self._stretch = stretch
        self._place = place
        self._names = tuple(inspect.signature(block.forward).parameters)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, ...]:
        """Evaluates the block, or hands on the states behind all blocks that are skipped."""
        inputs = dict(zip(self._names, args, strict=False)) | kwargs
        states = [inputs[self._names[0]]]
        if inputs.get(ENCODED) is not None:
            states.append(inputs[ENCODED])
        if self._place == 0:
            self._stretch.enter(states)
        now = self._stretch.now
        if now is not None:
            return now[0] if len(now) == 1 else tuple(reversed(now))
        made = self.block(*args, **kwargs)
        # A pair is that of text and image, in this order.
        behind = [made] if isinstance(made, Tensor) else [*reversed(made)]
        self._stretch.behind(self._place, states, behind)
        return made
