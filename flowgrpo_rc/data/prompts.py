"""Prompt files and the order in which training walks through them.

Both are pure: the prompts of a step follow from (seed, step) alone, so a resumed run needs no
sampler state, and the mini-batches of a step hold the same prompts whatever the number of
processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import torch

from flowgrpo_rc.batch import Prompt, PromptBatch
from flowgrpo_rc.core.random import generator
from flowgrpo_rc.data.readers import Row, find_file, read_rows

_OWN_KEYS = ("prompt", "target", "negative_prompt")
_SPLITS = {"data.train_files": "train", "data.val_files": "test"}


def read_prompts(
    paths: str | Path | Sequence[str | Path],
    *,
    require_target: bool,
    negative_text: str = "",
    key: str = "data.train_files",
) -> list[Prompt]:
    """The prompts of one or several files, in order; `Prompt.index` runs through all of them.

    .txt      one prompt a line
    .jsonl    one object a line: `prompt`, optional `target` and `negative_prompt`; all other keys are metadata
    .parquet  the same names as columns
    a folder  its file for `key`: train.txt, train_metadata.jsonl, ..., or test.* for `data.val_files`

    A prompt may be a chat, and the target `reward_model.ground_truth`, as in the files of verl-omni
    (`readers`). Where no target is given it is the text in the prompt's first pair of double
    quotes. `negative_text` is the negative prompt of prompts that have none. Raises ValueError
    naming `key`, the file and the line for whatever cannot be read, a blank line before the last
    prompt, a wrong type, and a missing or empty target under require_target.
    """
    given = [
        Path(path).expanduser() for path in ([paths] if isinstance(paths, (str, Path)) else paths)
    ]
    files = [find_file(path, _SPLITS[key], key) for path in given]
    if not files:
        raise ValueError(f"{key} names no file")
    prompts: list[Prompt] = []
    for file in files:
        rows = list(read_rows(file, key))
        if not rows:
            raise ValueError(f"{key}: {file} has no prompt")
        for place, row in rows:
            prompts.append(
                _prompt(row, f"{key}: {file}, {place}", len(prompts), require_target, negative_text)
            )
    return prompts


def quoted_text(text: str) -> str | None:
    """What stands in the first pair of double quotes; None where there is no pair."""
    pieces = text.split('"', 2)
    return pieces[1] if len(pieces) == 3 else None


class PromptSampler:
    """Which prompts belong to a step. Epoch by epoch, each a permutation drawn from (seed, epoch)
    alone.

    No prompt repeats inside an epoch, and an epoch may end inside a step. Without `shuffle` every
    epoch has the order of the files. Raises ValueError for fewer prompts than prompts_per_step.
    """

    def __init__(
        self, prompts: Sequence[Prompt], prompts_per_step: int, seed: int, shuffle: bool = True
    ) -> None:
        if not 1 <= prompts_per_step <= len(prompts):
            raise ValueError(
                f"data.train_batch_size={prompts_per_step} must be between 1 and the number of "
                "prompts in "
                f"data.train_files, {len(prompts)}"
            )
        self.prompts = prompts
        self.prompts_per_step = prompts_per_step
        self.seed = seed
        self.shuffle = shuffle
        self._order = lru_cache(maxsize=2)(self._epoch_order)

    def step(self, step: int) -> list[Prompt]:
        """The prompts of global step `step`, counted from 0; the same whenever and wherever it is
        asked.
        """
        if step < 0:
            raise ValueError(f"step={step} must not be negative")
        first = step * self.prompts_per_step
        places = [
            divmod(place, len(self.prompts))
            for place in range(first, first + self.prompts_per_step)
        ]
        return [self.prompts[self._order(epoch)[i]] for epoch, i in places]

    def _epoch_order(self, epoch: int) -> list[int]:
        if not self.shuffle:
            return list(range(len(self.prompts)))
        return torch.randperm(
            len(self.prompts), generator=generator(self.seed, epoch, "prompts")
        ).tolist()


def shard(
    prompts: Sequence[Prompt], *, step: int, mini_batch_size: int, rank: int, world_size: int
) -> PromptBatch:
    """The part of a step's prompts that process `rank` samples, with their slots in the global
    batch.

    Global mini-batch k is prompts [k * M, (k + 1) * M); every process takes its contiguous share of
    each, so that the k-th mini-batches of all processes together are global mini-batch k. Raises
    ValueError where mini-batches or shares would not come out even.
    """
    if mini_batch_size < 1 or len(prompts) % mini_batch_size:
        raise ValueError(
            f"actor.ppo_mini_batch_size={mini_batch_size} must divide "
            f"data.train_batch_size={len(prompts)}"
        )
    if mini_batch_size % world_size:
        raise ValueError(
            f"actor.ppo_mini_batch_size={mini_batch_size} (prompts over all processes) must be "
            "divisible by the "
            f"number of processes, {world_size}"
        )
    assert 0 <= rank < world_size, (rank, world_size)
    share = mini_batch_size // world_size
    starts = range(rank * share, len(prompts), mini_batch_size)
    slots = [slot for start in starts for slot in range(start, start + share)]
    return PromptBatch(step=step, prompts=[prompts[slot] for slot in slots], slots=slots)


def _prompt(row: Row, where: str, index: int, require_target: bool, negative_text: str) -> Prompt:
    text = _text(row, "prompt", where)
    if text is None or not text.strip():
        raise ValueError(f"{where}: the prompt is {'missing' if text is None else 'empty'}")
    given, negative = _text(row, "target", where), _text(row, "negative_prompt", where)
    target = quoted_text(text) if given is None else given
    if require_target and (target is None or not target.strip()):
        raise ValueError(
            f"{where}: {text!r} has {'no' if target is None else 'an empty'} target; the reward "
            "needs one: put the "
            f'text that the image should show between double quotes, or give the key "target"'
        )
    return Prompt(
        text=text,
        index=index,
        target=target if target and target.strip() else None,
        negative_text=negative_text if negative is None else negative,
        metadata={name: value for name, value in row.items() if name not in _OWN_KEYS},
    )


def _text(row: Row, name: str, where: str) -> str | None:
    value = row.get(name)
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{where}: {name} must be a text, got {value!r}")
    return value
