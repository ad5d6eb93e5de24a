"""Checks of prompts against the model: its images, and the tokens that it reads of their texts."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from flowgrpo_rc import assets
from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.config.tree import Config
from flowgrpo_rc.data.prompts import places_of, prompt_files
from flowgrpo_rc.evaluation.suite import Suite
from flowgrpo_rc.models.architecture import load_tokenizers
from flowgrpo_rc.models.base import FlowModel
from flowgrpo_rc.models.causal_lm import check_context, load_tokenizer, shown_tokens, token_ids
from flowgrpo_rc.models.editing import EditingModel
from flowgrpo_rc.pictures import name_of, picture_size
from flowgrpo_rc.plugins import check_packages
from flowgrpo_rc.rewards.base import prompt_name
from flowgrpo_rc.rewards.manager import build_terms, requires_target
from flowgrpo_rc.spec.check_inputs import Prompts, files_of
from flowgrpo_rc.spec.run_spec import RunSpec

logger = logging.getLogger(__name__)


_UNKNOWN = "prompts have letters unknown to {}, which are all read alike"
# Prompts that are asked together, whether a reward needs their targets, and how one is named.
_Group = tuple[Sequence[Prompt], bool, Callable[[Prompt], str]]


def check_images(run: RunSpec, model: FlowModel, prompts: Prompts) -> None:
    """Checks that the model's packages are there and that it takes images of the prompts' sizes."""
    config = run.settings
    if not isinstance(model, EditingModel):
        return
    what = f"model.path={config.model.path}: a {model.pipeline_class}"
    check_packages(what, model.packages, "editing")
    for read, _, where in _groups(run, prompts):
        for prompt in read:
            for image in prompt.images:
                try:
                    model.image_size(*picture_size(image), config.rollout.spec())
                except ValueError as error:
                    raise ValueError(f"{where(prompt)}: {name_of(image)}: {error}") from error


def check_rows(run: RunSpec, prompts: Prompts) -> None:
    """Warns of prompts that stand twice, and of the package's held-out words for other prompts."""
    config = run.settings
    for read, _, where in _groups(run, prompts):
        first: dict[object, Prompt] = {}
        keys = ((prompt, (prompt.text, str(prompt.messages), prompt.images)) for prompt in read)
        repeats = [prompt for prompt, key in keys if first.setdefault(key, prompt) is not prompt]
        _warn(repeats, read, "prompts repeat an earlier one", where)
    n = config.rollout.val_kwargs.n
    available = len(prompts.held_out)
    if n is not None and n > available:
        words = "rollout.val_kwargs.n=%d: data.val_files has %d prompts, and all of them are used"
        logger.warning(words, n, available)
    trained, held_out = (
        all(file.is_relative_to(assets.ROOT) for file in prompt_files(files, key))
        for key, files, _ in files_of(config, prompts)
    )
    if held_out and not trained and config.trainer.test_freq != -1:
        logger.warning(
            "data.val_files=%s: the held-out prompts are those of the package, and those of "
            "data.train_files are not: give data.val_files, too",
            config.data.val_files,
        )


def check_texts(
    run: RunSpec, model: FlowModel | None, prompts: Prompts | None, suites: Sequence[Suite]
) -> str:
    """Checks how much of the texts a model reads; without one, a language model takes them whole.

    Returns the first prompt of a language model as tokens, for a reader.
    """
    config = run.settings
    groups = _groups(run, prompts, suites)
    if model is not None:
        _check_cuts(config, model, groups)
        return ""
    rollout = config.rollout
    template = config.model.chat_template_kwargs
    most = rollout.engine_kwargs.get("max_model_len")
    check_context(config.model, rollout.prompt_length, rollout.response_length, most)
    tokenizer = load_tokenizer(config.model)
    first = ""
    for read, _, where in groups:
        unknown = []
        alike = []
        texts: dict[tuple[int, ...], Prompt] = {}  # the first prompt with these tokens
        for prompt in read:
            try:
                ids = token_ids(tokenizer, prompt.said, template, max_length=rollout.prompt_length)
            except ValueError as error:
                raise ValueError(f"{where(prompt)}: {error}") from error
            first = first or shown_tokens(tokenizer, ids)
            if _has_unknown(tokenizer, ids):
                unknown.append(prompt)
            elif texts.setdefault(tuple(ids), prompt).said != prompt.said:
                alike.append(prompt)
        _warn(alike, read, "prompts become the same tokens as another prompt", where)
        _warn(unknown, read, _UNKNOWN.format("the tokenizer"), where)
    return first


def _check_cuts(config: Config, model: FlowModel, groups: Iterable[_Group]) -> None:
    """Warns of prompts that an encoder cuts; refuses one whose needed target no encoder reads."""
    spec = config.rollout.spec()
    key = f"rollout.pipeline.max_sequence_length={spec.max_sequence_length}"
    samplers = (spec, config.rollout.held_out_spec())
    guided = any(model.cfg_scale(sampler) > 1 for sampler in samplers)
    tokenizers = load_tokenizers(config.model)
    for name, tokenizer in tokenizers.items():
        encoder = model.pipeline.components.get(name.replace("tokenizer", "text_encoder"))
        last = max(tokenizer.get_vocab().values())
        if encoder is not None and last >= len(encoder.get_input_embeddings().weight):
            raise ValueError(
                f"model.path={config.model.path}: its {name} has tokens up to {last}, which its "
                "text encoder lacks"
            )
    limits = {
        name: (tokenizer, most)
        for name, tokenizer in tokenizers.items()
        if (most := model.most_tokens(tokenizer, spec)) is not None
    }
    for read, needs_target, where in groups:
        cut_by_all = set(range(len(read)) if limits else ())
        warnings: dict[tuple[str, tuple[int, ...]], list[str]] = {}  # what, of which rows: by whom
        negatives = [prompt.negative_text for prompt in read]
        if not guided:
            words = "prompts bring a negative prompt, which has no effect without guidance: set "
            words += f"rollout.pipeline.{model.cfg_key} above {model.unguided_scale:g} to use it"
            _warn([prompt for prompt in read if prompt.negative_text.strip()], read, words, where)
        for name, (tokenizer, most) in limits.items():
            texts = [prompt.text for prompt in read]
            ids_of_rows = enumerate(tokenizer(texts).input_ids)
            unknown = [row for row, ids in ids_of_rows if _has_unknown(tokenizer, ids)]
            cut = _cut(model, tokenizer, most, texts)
            cut_by_all &= set(cut)
            without = _cut(model, tokenizer, most, negatives) if guided else []
            long = f"prompts are cut: they have more than the {most} tokens kept by {{}} ({key})"
            finds = {_UNKNOWN: unknown, long: cut, f"negative {long}": without}
            for words, rows in finds.items():
                warnings.setdefault((words, tuple(rows)), []).append(name)
        for (words, places), names in warnings.items():
            _warn([read[row] for row in places], read, words.format(", ".join(names)), where)
        for row in sorted(cut_by_all) if needs_target else ():
            reads = (_reads_target(model, read[row], *limit) for limit in limits.values())
            if not any(reads):
                raise ValueError(
                    f"{where(read[row])}: its target {read[row].target!r} lies behind the "
                    f"{max(most for _, most in limits.values())} tokens that the model reads of a "
                    f"prompt, so no sample could show it: shorten the prompt, or raise {key}"
                )


def _has_unknown(tokenizer: Any, ids: Sequence[int]) -> bool:
    """Returns whether a text has letters that the tokenizer reads as its unknown token."""
    unknown = tokenizer.unk_token_id
    # That of CLIP is the end of every text, and none of its letters is unknown.
    return unknown is not None and unknown != tokenizer.eos_token_id and unknown in ids


def _warn(
    concerned: Sequence[Prompt], read: Sequence[Prompt], words: str, where: Callable[[Prompt], str]
) -> None:
    if concerned:
        counts = (len(concerned), len(read))
        logger.warning("%d of %d %s; the first is %s", *counts, words, where(concerned[0]))


def _cut(model: FlowModel, tokenizer: Any, most: int, texts: Sequence[str]) -> list[int]:
    """Returns the places of the texts that have more than `most` tokens."""
    distinct = list(dict.fromkeys(texts))
    ids = tokenizer([model.templated(tokenizer, text) for text in distinct]).input_ids
    long = {text for text, row in zip(distinct, ids, strict=True) if len(row) > most}
    return [row for row, text in enumerate(texts) if text in long]


def _reads_target(model: FlowModel, prompt: Prompt, tokenizer: Any, most: int) -> bool:
    """Returns whether a prompt's target is among the tokens that are kept, or not in the text."""
    text = prompt.text.strip()
    quoted = f'"{prompt.target}"'
    target = quoted if quoted in text else prompt.target or ""
    if target not in text:
        return True
    whole = model.templated(tokenizer, prompt.text)
    end = max(whole.rfind(text), 0) + text.find(target) + len(target)
    return len(tokenizer(whole[:end]).input_ids) <= most


def _groups(
    run: RunSpec, prompts: Prompts | None, suites: Sequence[Suite] = ()
) -> Iterator[_Group]:
    """Yields the prompts of training, the held-out ones, and those of each suite."""
    if prompts is not None:
        needs = bool(requires_target(run.rewards))
        for key, paths, read in files_of(run.settings, prompts):
            yield read, needs, partial(_place, paths, key)
    for suite in suites:
        needs = bool(requires_target(build_terms(suite.reward)))
        yield suite.prompts, needs, partial(_of_suite, suite)


def _place(paths: Any, key: str, prompt: Prompt) -> str:
    return places_of(paths, key)[prompt.index]


def _of_suite(suite: Suite, prompt: Prompt) -> str:
    return f"suite {suite.name}, {prompt_name(prompt)}"
