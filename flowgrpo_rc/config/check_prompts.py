"""Checks of prompts against the model: its images, and the tokens that it reads of their texts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.config.check_inputs import Prompts
from flowgrpo_rc.config.tree import Config
from flowgrpo_rc.data.prompts import place_of
from flowgrpo_rc.evaluation.suite import Suite
from flowgrpo_rc.models.architecture import load_tokenizers
from flowgrpo_rc.models.base import FlowModel
from flowgrpo_rc.models.causal_lm import check_context, load_tokenizer, shown_tokens, token_ids
from flowgrpo_rc.models.editing import EditingModel
from flowgrpo_rc.pictures import name_of, picture_size
from flowgrpo_rc.plugins import install_hint
from flowgrpo_rc.rewards.manager import requires_target

logger = logging.getLogger(__name__)


class _Asked(NamedTuple):
    """Holds prompts that are asked together, and how a message names one of them."""

    prompts: Sequence[Prompt]
    where: Callable[[Prompt], str]
    needs_target: bool


def check_images(config: Config, model: FlowModel, prompts: Prompts) -> None:
    """The model's packages are there, and it takes images of the sizes that the prompts bring."""
    if not isinstance(model, EditingModel):
        return
    for package in model.packages:
        if find_spec(package) is None:
            raise ValueError(
                f"model.path={config.model.path}: a {model.pipeline_class} needs {package}: "
                f"{install_hint('editing')}"
            )
    for asked in _asked(config, prompts):
        for prompt in asked.prompts:
            for image in prompt.images:
                try:
                    model.image_size(*picture_size(image), config.rollout.spec())
                except ValueError as error:
                    where = asked.where(prompt)
                    raise ValueError(f"{where}: {name_of(image)}: {error}") from error


def check_tokens(config: Config, prompts: Prompts | None, suites: Sequence[Suite]) -> str:
    """A language model has room for whole prompts and answers, and its template takes all chats.

    Returns the first prompt of training as tokens, for a reader.
    """
    model, rollout = config.model, config.rollout
    most = rollout.engine_kwargs.get("max_model_len")
    check_context(model, rollout.prompt_length, rollout.response_length, most)
    tokenizer = load_tokenizer(model)
    encode = partial(
        token_ids, tokenizer, template=model.chat_template_kwargs, max_length=rollout.prompt_length
    )
    for asked in _asked(config, prompts, suites):
        for prompt in asked.prompts:
            try:
                encode(prompt.said)
            except ValueError as error:
                raise ValueError(f"{asked.where(prompt)}: {error}") from error
    return (
        "" if prompts is None else shown_tokens(tokenizer, encode(prompts.sampler.prompts[0].said))
    )


def check_text(
    config: Config, model: FlowModel, prompts: Prompts | None, suites: Sequence[Suite]
) -> None:
    """Warns of prompts that an encoder cuts; refuses one whose needed target no encoder reads."""
    spec = config.rollout.spec()
    limits = [
        (name, tokenizer, most)
        for name, tokenizer in load_tokenizers(config.model).items()
        if (most := model.most_tokens(tokenizer, spec)) is not None
    ]
    for asked in _asked(config, prompts, suites):
        for prompt in asked.prompts if asked.needs_target and limits else ():
            end = _end_of_target(prompt)
            if end is not None and all(
                _length(model, tokenizer, prompt.text, end) > most for _, tokenizer, most in limits
            ):
                raise ValueError(
                    f"{asked.where(prompt)}: its target {prompt.target!r} lies behind the "
                    f"{max(most for *_, most in limits)} tokens that the model reads of a prompt, "
                    "so no sample could show it: shorten the prompt, or raise "
                    f"rollout.pipeline.max_sequence_length={spec.max_sequence_length}"
                )
        for name, tokenizer, most in limits:
            cut = [p for p in asked.prompts if _length(model, tokenizer, p.text) > most]
            if cut:
                logger.warning(
                    "%d of %d prompts are cut: they have more than the %d tokens that %s keeps "
                    "(rollout.pipeline.max_sequence_length=%d); the first is %s",
                    *(len(cut), len(asked.prompts), most, name, spec.max_sequence_length),
                    asked.where(cut[0]),
                )


def _length(model: FlowModel, tokenizer: Any, text: str, end: int | None = None) -> int:
    """Returns the tokens of a prompt in its template; with `end`, up to that place of its text."""
    whole = model.templated(tokenizer, text)
    if end is not None:
        whole = whole[: max(whole.rfind(text.strip()), 0) + end]
    return len(tokenizer(whole).input_ids)


def _end_of_target(prompt: Prompt) -> int | None:
    """Returns where the target ends in the text, quoted if it is; None if it is not there."""
    for target in (f'"{prompt.target}"', prompt.target):
        if target and target in prompt.text.strip():
            return prompt.text.strip().find(target) + len(target)
    return None


def _asked(
    config: Config, prompts: Prompts | None, suites: Sequence[Suite] = ()
) -> Iterator[_Asked]:
    """Yields the prompts of training, the held-out ones, and those of each suite."""
    data = config.data
    if prompts is not None:
        needs = requires_target(config.reward)
        for key, paths, read in (
            ("data.train_files", data.train_files, prompts.sampler.prompts),
            ("data.val_files", data.val_files, prompts.held_out),
        ):
            yield _Asked(read, partial(_place, paths, key), needs)
    for suite in suites:
        yield _Asked(suite.prompts, partial(_of_suite, suite.name), requires_target(suite.reward))


def _place(paths: Any, key: str, prompt: Prompt) -> str:
    return place_of(paths, key, prompt.index)


def _of_suite(name: str, prompt: Prompt) -> str:
    return f"suite {name}, prompt {prompt.index + 1}"
