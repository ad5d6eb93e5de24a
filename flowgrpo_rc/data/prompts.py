"""Reading prompt files, and choosing the prompts of each training step.

The prompts of a step follow from the seed, the step and the number of further prompts that earlier
steps have drawn, which only `algorithm.filter_groups` does. So the mini-batches of a step hold the
same prompts for any number of processes.
"""

import json
import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import torch

from flowgrpo_rc.batch import Prompt, PromptBatch
from flowgrpo_rc.core.random import generator
from flowgrpo_rc.data.chats import read_chat
from flowgrpo_rc.data.images import IMAGE_KEYS, images_of
from flowgrpo_rc.data.readers import Row, find_file, read_rows
from flowgrpo_rc.plugins import refuse

logger = logging.getLogger(__name__)
_INCHES = re.compile("[0-9¼½¾⅛⅜⅝⅞]$")
_TEXTS = ("prompt", "target", "negative_prompt")
# Columns that a language model does not read, and why.
_IGNORED = {
    "tools": "prompts name none, and none is called",
    "chat_template_kwargs": "model.chat_template_kwargs gives the options of all prompts",
    "negative_prompt": "only models of images have one",
}
# `prompts` is the key of a suite.
_SPLITS = {"data.train_files": "train", "data.val_files": "test", "prompts": "test"}


def read_prompts(
    paths: str | Path | Sequence[str | Path],
    *,
    require_target: bool | str,
    negative_text: str = "",
    key: str = "data.train_files",
    most_images: int = 0,
    chats: bool = False,
) -> list[Prompt]:
    """Reads the prompts of one or several files, in order.

        .txt      one prompt a line
        .jsonl    one object a line: `prompt`, and optionally `target`, `negative_prompt` and
                  `image` or `images`; all other keys are metadata
        .parquet  the same names as columns
        a folder  its file for `key`: train.txt, train_metadata.jsonl and so on, or test.* for
                  `data.val_files`

    The files of verl are understood too: a prompt may be a chat, and the target may be in
    `reward_model.ground_truth`. A prompt of an image without a target gets the text in its first
    pair of double quotes. An image is a path relative to the prompt file, or its content:
    {"base64": ...}, in parquet {"bytes": ...}; several are a list.

    Args:
      paths: files or folders, one or several.
      require_target: refuse a prompt whose target is missing or empty; a text says who needs it.
      negative_text: negative prompt of the prompts that have none.
      key: the configuration key that the paths come from, `data.train_files` or `data.val_files`.
      most_images: the most images of a prompt, which then has at least one; 0 refuses images.
      chats: keep all messages of a chat, for a language model; else it has one turn, of which the
        user's text is the prompt.

    Returns:
      The prompts. Their `index` runs through all files.

    Raises:
      ValueError: a file cannot be read or has a value of a wrong type, a target or an image is
        missing, or an image is too large or no picture. The message names key, file and line.
    """
    files = prompt_files(paths, key)
    refuse((not files, f"{key} names no file"))
    prompts: list[Prompt] = []
    for file in files:
        rows = list(read_rows(file, key))
        refuse((not rows, f"{key}: {file} has no prompt"))
        for place, row in rows:
            where = f"{key}: {file}, {place}"
            _check_letters(row, where)
            plain, messages = read_chat(row, where, whole=chats)
            prompt = _prompt(plain, where, len(prompts), require_target, negative_text, not chats)
            images = images_of(row, file.parent, where, most_images)
            prompts.append(replace(prompt, images=images, messages=messages))
        for column, why in _IGNORED.items() if chats else ():
            if any(row.get(column) for _, row in rows):
                logger.warning("%s: %s: the column %s is ignored: %s", key, file, column, why)
    return prompts


def places_of(paths: str | Path | Sequence[str | Path], key: str) -> list[str]:
    """Returns where each prompt stands that `read_prompts` reads there, for messages."""
    return [
        f"{key}: {file}, {place}"
        for file in prompt_files(paths, key)
        for place, _ in read_rows(file, key)
    ]


def prompt_files(paths: str | Path | Sequence[str | Path], key: str) -> list[Path]:
    """Returns the prompt files that `read_prompts` reads; ValueError if a folder lacks one."""
    listed = [paths] if isinstance(paths, str) or not isinstance(paths, Sequence) else list(paths)
    if not all(isinstance(path, str | Path) for path in listed):
        raise ValueError(f"{key}={paths!r}: give a prompt file, a folder, or a list of them")
    return [find_file(Path(path).expanduser(), _SPLITS[key], key) for path in listed]


def quoted_text(text: str) -> str | None:
    """Returns the text in the first pair of double quotes; None if there is no pair.

    ValueError if the quotes do not pair up, such as after inches.
    """
    pieces = text.split('"')
    if len(pieces) < 3:
        return None
    half_curly = any(sum(map(piece.count, "“”„")) % 2 for piece in pieces)
    refuse(
        (len(pieces) % 2 == 0, "an odd number of double quotes"),
        (_INCHES.search(pieces[0]), "a double quote after a digit, which may be an inch mark"),
        (
            pieces[1] and ('""' in text or '\\"' in text or half_curly),
            "double quotes that are escaped, doubled or mixed with curly ones",
        ),
    )
    return pieces[1]


class PromptSampler:
    """The order in which training walks through the prompts.

    Each epoch is a permutation that is drawn from (seed, epoch) alone. No prompt repeats inside an
    epoch, and an epoch may end inside a step. ValueError if there are fewer prompts than one step
    takes.

    Attributes:
      num_further: prompts that were drawn beyond those of the steps; the steps to come begin so
        many places later.
    """

    def __init__(self, prompts: Sequence[Prompt], prompts_per_step: int, seed: int) -> None:
        if not 1 <= prompts_per_step <= len(prompts):
            raise ValueError(
                f"data.train_batch_size={prompts_per_step} must be between 1 and the number of "
                f"prompts in data.train_files, {len(prompts)}"
            )
        self.prompts = prompts
        self.prompts_per_step = prompts_per_step
        self.seed = seed
        self.num_further = 0
        # A step may touch two epochs, so the last two permutations are kept.
        self._order = lru_cache(maxsize=2)(self._epoch_order)

    def step(self, step: int) -> list[Prompt]:
        """Returns the prompts of the global batch of a step, from 0; the same on all processes."""
        return self._walk(step, self.prompts_per_step)

    def further(self, step: int, count: int) -> list[Prompt]:
        """Draws the `count` prompts that come next after all that a step, from 0, has taken."""
        prompts = self._walk(step + 1, count)
        self.num_further += count
        return prompts

    def _walk(self, steps: int, count: int) -> list[Prompt]:
        first = steps * self.prompts_per_step + self.num_further
        places = range(first, first + count)
        epochs = [divmod(place, len(self.prompts)) for place in places]
        return [self.prompts[self._order(epoch)[i]] for epoch, i in epochs]

    def _epoch_order(self, epoch: int) -> list[int]:
        source = generator(self.seed, epoch, "prompts")
        return torch.randperm(len(self.prompts), generator=source).tolist()


def shard(
    prompts: Sequence[Prompt], *, step: int, mini_batch_size: int, rank: int, world_size: int
) -> PromptBatch:
    """Selects the prompts of a step, of all its `prompts`, that one process samples.

    Global mini-batch k holds the prompts [k M, (k + 1) M), where M is mini_batch_size. Every
    process takes an equal, contiguous share of each. So the k-th mini-batches of all processes
    together are global mini-batch k.
    """
    # The settings are checked before anything is loaded.
    assert len(prompts) % mini_batch_size == 0, (len(prompts), mini_batch_size)
    assert mini_batch_size % world_size == 0, (mini_batch_size, world_size)
    share = mini_batch_size // world_size
    starts = range(rank * share, len(prompts), mini_batch_size)
    slots = [slot for start in starts for slot in range(start, start + share)]
    return PromptBatch(step=step, prompts=[prompts[slot] for slot in slots], slots=slots)


def _prompt(
    row: Row, where: str, index: int, require_target: bool | str, negative_text: str, guess: bool
) -> Prompt:
    text, target, negative = (_text(row, name, where) for name in _TEXTS)
    columns = ", ".join(row) or "nothing"
    if text is None or _is_blank(text):
        missing = f"the prompt is missing: the row has {columns}, and no prompt"
        raise ValueError(f"{where}: {missing if text is None else 'the prompt is empty'}")
    if target is None and guess:
        try:
            target = quoted_text(text)
        except ValueError as error:
            if require_target:
                raise ValueError(f'{where}: {text!r} has {error}: give the key "target"') from error
    if require_target and (target is None or _is_blank(target)):
        who = require_target if isinstance(require_target, str) else "the reward"
        quoted = "put the text that the image should show between double quotes, or "
        raise ValueError(
            f"{where}: {text!r} has {'no' if target is None else 'an empty'} target; "
            f'{who} needs one: {quoted if guess else ""}give the key "target"'
        )
    return Prompt(
        text=text,
        index=index,
        target=None if target is None or _is_blank(target) else target,
        negative_text=negative_text if negative is None else negative,
        metadata={name: value for name, value in row.items() if name not in (*_TEXTS, *IMAGE_KEYS)},
    )


def _text(row: Row, name: str, where: str) -> str | None:
    value = row.get(name)
    if not isinstance(value, str | None):
        raise ValueError(f"{where}: {name} must be a text, got {value!r}")
    return value


def _is_blank(text: str) -> bool:
    """Returns whether a reader sees nothing: spaces, and marks without a width."""
    return not any(letter.isprintable() and letter not in " \ufe0e\ufe0f" for letter in text)


def _check_letters(row: Row, where: str) -> None:
    """Raises ValueError for what is no letter: NUL, and half a letter, which JSON can write."""
    for name, value in row.items():
        written = json.dumps([name, value], ensure_ascii=False, default=lambda other: None)
        has_nul = r"\u0000" in written.replace(r"\\", "")
        refuse((has_nul, f"{where}: {name!r} holds NUL: if this is UTF-16, save it as UTF-8"))
        try:
            written.encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start]
            raise ValueError(f"{where}: {name!r} holds {half!r}, which is no UTF-8") from error
