"""Checks of all that a run needs besides its model: settings, device, prompts, rewards, trackers.

They import no library of models, so the command line calls them before it imports one.
"""

import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import try_to_load_from_cache

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.config.tree import Config
from flowgrpo_rc.data.prompts import PromptSampler, places_of, prompt_files, read_prompts
from flowgrpo_rc.evaluation.suite import Suite, read_suites
from flowgrpo_rc.models.config import INDEX_FILES
from flowgrpo_rc.pictures import picture_digest
from flowgrpo_rc.records.inputs import Input, code_input, file_input, model_inputs, prompts_input
from flowgrpo_rc.records.trackers import check_login
from flowgrpo_rc.rewards.manager import (
    check_images,
    check_needs,
    check_prompts,
    codes,
    requires_target,
)
from flowgrpo_rc.spec.check_folder import check_output
from flowgrpo_rc.spec.check_settings import SCORED, check_settings
from flowgrpo_rc.spec.run_spec import RunSpec


class Prompts(NamedTuple):
    """The prompts of training and of evaluation, and what evaluations ask besides."""

    sampler: PromptSampler
    held_out: Sequence[Prompt]
    suites: Sequence[Suite] = ()


def check_inputs(spec: RunSpec, *, trains: bool = True) -> Prompts:
    """Checks all that can be checked without the libraries of models; returns the prompts."""
    config = spec.settings
    check_settings(spec)
    if trains:
        check_output(config)
    prompts = prompts_of(spec)
    if trains:
        check_login(config.trainer.logger)
    check_needs(spec.rewards)
    for key, files, read in files_of(config, prompts):
        check_prompts(spec.rewards, read, partial(places_of, files, key))
    return prompts._replace(suites=suites_of(config) if trains else ())


def suites_of(config: Config) -> list[Suite]:
    """Reads `trainer.suites`, whose rewards must score what the model makes."""
    return read_suites(config.trainer.suites, *SCORED[config.model.kind])


def prompts_of(spec: RunSpec) -> Prompts:
    """Reads the prompt files and checks their condition images."""
    config, data = spec.settings, spec.settings.data
    for name in ("train_files", "val_files"):
        if not getattr(data, name):
            raise ValueError(
                f"data.{name} is empty: give a prompt file (.txt, .jsonl, .parquet) or a list of "
                "them"
            )
    check_images(spec.rewards, config.rollout.pipeline.condition_images)
    target = requires_target(spec.rewards)
    train, held_out = (
        read_prompts(
            files,
            require_target=target,
            negative_text=data.negative_prompt,
            key=f"data.{name}",
            most_images=config.rollout.pipeline.condition_images,
            chats=spec.is_text,
        )
        for name, files in (("train_files", data.train_files), ("val_files", data.val_files))
    )
    return Prompts(PromptSampler(train, data.train_batch_size, config.trainer.seed), held_out)


def check_overlap(config: Config, prompts: Prompts) -> None:
    """Raises ValueError if held-out prompts are training prompts, unless that is allowed."""
    if config.data.allow_overlap or config.trainer.test_freq == -1:
        return
    texts = {prompt.text for prompt in prompts.held_out}
    trained = {_content(prompt) for prompt in prompts.sampler.prompts if prompt.text in texts}
    shared = [prompt for prompt in prompts.held_out if _content(prompt) in trained]
    if shared:
        raise ValueError(
            f"{len(shared)} of {len(prompts.held_out)} held-out prompts are training prompts, too, "
            f"the first is {shared[0].text!r}: give others in data.val_files, or set "
            "data.allow_overlap=true"
        )


def _content(prompt: Prompt) -> tuple[object, ...]:
    """Returns what a model is given of a prompt."""
    images = tuple(map(picture_digest, prompt.images))
    return prompt.text, json.dumps(prompt.messages, default=str), images


def files_of(config: Config, prompts: Prompts) -> Iterator[tuple[str, Any, Sequence[Prompt]]]:
    """Yields each key of prompt files, what it names, and the prompts that were read there."""
    yield "data.train_files", config.data.train_files, prompts.sampler.prompts
    yield "data.val_files", config.data.val_files, prompts.held_out


def inputs_of(spec: RunSpec, prompts: Prompts) -> dict[str, Input]:
    """Returns what is on this machine of all that a run reads, by the setting that names it.

    A model from the hub counts with the files that have been fetched, a reward of the user with the
    source of its function or class alone. The code of other plug-ins, the files of
    `data.replay_dir`, and `model.lora_path`, which a run that goes on no longer reads, are left
    out.
    """
    config = spec.settings
    inputs = {
        key: prompts_input(prompt_files(files, key), read)
        for key, files, read in files_of(config, prompts)
    }
    model = Path(config.model.path).expanduser()
    if not model.is_dir():  # it is on the hub, and perhaps nothing of it has been fetched
        index = try_to_load_from_cache(config.model.path, INDEX_FILES[config.model.kind])
        model = Path(index).parent if isinstance(index, str) else model
    if model.is_dir():
        inputs |= model_inputs("model.path", model)
    for name, term in config.reward.terms.items():
        for option, value in (term or {}).items():
            if isinstance(value, str) and "/" in value and Path(value).expanduser().exists():
                key, path = f"reward.terms.{name}.{option}", Path(value).expanduser()
                inputs |= model_inputs(key, path) if path.is_dir() else {key: file_input(path)}
    for name, code in codes(spec.rewards).items():
        inputs |= code_input(f"reward.terms.{name}", code)
    return inputs
