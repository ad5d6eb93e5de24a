"""Finds what a run reads: prompts, models, checkpoints of rewards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import try_to_load_from_cache

from flowgrpo_rc.config.check_inputs import Prompts
from flowgrpo_rc.config.tree import Config
from flowgrpo_rc.data.prompts import prompt_files
from flowgrpo_rc.models.config import INDEX_FILES
from flowgrpo_rc.records.inputs import Input, file_input, model_inputs, prompts_input


def inputs_of(config: Config, prompts: Prompts) -> dict[str, Input]:
    """Returns what is on this machine of all that a run reads, by the setting that names it.

    A model from the hub counts with the files that have been fetched. The code of a plug-in, the
    files of `data.replay_dir`, and `model.lora_path`, which a run that goes on no longer reads, are
    left out.
    """
    data = config.data
    found = {
        key: prompts_input(prompt_files(given, key), read)
        for key, given, read in (
            ("data.train_files", data.train_files, prompts.sampler.prompts),
            ("data.val_files", data.val_files, prompts.held_out),
        )
    }
    model = _folder_of_model(config)
    if model is not None:
        found |= model_inputs("model.path", model)
    for key, path in _paths_of_rewards(config):
        found |= model_inputs(key, path) if path.is_dir() else {key: file_input(path)}
    return found


def _folder_of_model(config: Config) -> Path | None:
    """The folder of the model; None if it is on the hub and nothing of it has been fetched."""
    folder = Path(config.model.path).expanduser()
    if folder.is_dir():
        return folder
    index = try_to_load_from_cache(config.model.path, INDEX_FILES[config.model.kind])
    return Path(index).parent if isinstance(index, str) else None


def _paths_of_rewards(config: Config) -> Iterator[tuple[str, Path]]:
    """Yields the options of rewards that are the path of a file or folder."""
    for name, term in config.reward.terms.items():
        for option, value in (term or {}).items():
            if isinstance(value, str) and "/" in value and Path(value).expanduser().exists():
                yield f"reward.terms.{name}.{option}", Path(value).expanduser()
