"""Tests what a model reads of its prompts: image encoders cut, language models take them whole."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.compositions import resolved
from support.runs import SMALL_TEXT, Train
from support.subjects import Subject, make_subject
from transformers import AutoTokenizer

from flowgrpo_rc import assets
from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.cli import main
from flowgrpo_rc.config.tree import Config
from flowgrpo_rc.models.architecture import build_architecture, load_tokenizers
from flowgrpo_rc.models.base import FlowModel, adapters_by_pipeline
from flowgrpo_rc.policies.encode_prompts import encode_prompts
from flowgrpo_rc.spec.check_prompts import _reads_target, check_texts

LONG = "a " * 60
OCR = "reward.terms.ocr.weight=1"


@pytest.fixture(params=sorted(adapters_by_pipeline()))
def subject(request: pytest.FixtureRequest, saved: Callable[[str], Path]) -> Subject:
    return make_subject(request.param, saved)


def test_what_counts_as_cut_is_what_the_stock_pipeline_does_not_read(subject: Subject) -> None:
    """Two texts that differ in their last letter are encoded alike wherever that is cut."""
    model, tiny = subject.load(), subject.tiny
    spec = tiny.spec("sde", tiny.unguided, max_sequence_length=12)
    tokenizers = load_tokenizers(subject.config())
    assert set(tokenizers) == {name for name in model.pipeline.components if "tokenizer" in name}
    limits = [(each, model.most_tokens(each, spec)) for each in tokenizers.values()]

    def encoded(text: str) -> list[torch.Tensor]:
        prompt = Prompt(text=text, index=0, images=tiny.images(0))
        found, _ = encode_prompts(model, [prompt], spec)
        return [found.embeds] if found.pooled is None else [found.embeds, found.pooled]

    seen = []
    for count in range(1, 31):
        first, second = ("z" * count + letter for letter in "xy")
        prompt = Prompt(text=first, index=0, target=first)
        ours = any(
            most is None or _reads_target(model, prompt, each, most) for each, most in limits
        )
        pairs = zip(encoded(first), encoded(second), strict=True)
        assert ours == any(not torch.equal(one, other) for one, other in pairs), count
        seen.append(ours)
    whole = all(most is None for _, most in limits)
    assert seen == sorted(seen, reverse=True)
    assert any(seen)
    assert all(seen) == whole


def test_texts_that_a_model_cannot_read(saved: Callable[[str], Path], tmp_path: Path) -> None:
    config = Config()
    config.model.path = str(tmp_path / "model")
    shutil.copytree(saved("ZImagePipeline"), config.model.path)
    tokenizer = load_tokenizers(config.model)["tokenizer"]
    model = build_architecture(config.model)
    for template, words in (
        ("hello", "drops the prompt 'a'"),
        ("{{ raise_exception('no') }}", "no"),
    ):
        tokenizer.chat_template = template
        with pytest.raises(ValueError, match=rf"^model\.path: the chat template .* {words}"):
            model.templated(tokenizer, "a")
    tokenizer.add_tokens(["a token"])
    tokenizer.save_pretrained(tmp_path / "model" / "tokenizer")
    with pytest.raises(
        ValueError, match=r"its tokenizer has tokens up to 103, which its text encoder lacks"
    ):
        check_texts(resolved(config), model, None, ())


@pytest.mark.parametrize(
    ("text", "target", "reads"),
    [
        ('OPEN 234 "OPEN"', "OPEN", False),  # the quoted one counts
        ('OPEN 234 "OPEN"', "OPEN 2", True),
        (" 12345678, OPEN ", "OPEN", False),
        (" 1234, OPEN ", "OPEN", True),
        ("a shop, and a long one", "OPEN", True),  # nothing of it is behind the cut
        ("a shop, and a long one", None, True),
    ],
)
def test_where_a_target_stands(
    loaded: FlowModel, text: str, target: str | None, reads: bool
) -> None:
    tokenizer = loaded.pipeline.tokenizer_3  # a token a letter, and an end
    assert _reads_target(loaded, Prompt(text=text, index=0, target=target), tokenizer, 13) == reads


def dry_run(overrides: list[str], file: Path, *further: str) -> int:
    files = [f"data.{kind}_files={file}" for kind in ("train", "val")]
    return main(["train", "--dry-run", *overrides, *files, "data.train_batch_size=2", *further])


def test_a_target_behind_the_cut_is_refused(
    overrides: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "p.txt"
    file.write_text(f'a "HI"\n{LONG}"WORLD"\n')
    assert dry_run(overrides, file, OCR) == 2
    error = capsys.readouterr().err
    for words in ("data.train_files", "p.txt, line 2", "'WORLD'", "max_sequence_length"):
        assert words in error


def test_other_cut_prompts_are_counted_and_the_first_is_named(
    overrides: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "p.txt"
    file.write_text(f'a "HI"\n"ME" {LONG}\n"WE" {LONG}\n')
    assert dry_run(overrides, file, OCR) == 0
    said = caplog.text
    words = "2 of 3 prompts are cut: they have more than the 16 tokens kept by tokenizer, tokeni"
    assert said.count(words) == said.count("are cut") == 2  # of training and held-out prompts
    assert f"the first is data.train_files: {file}, line 2" in said
    caplog.clear()
    # Without a reward that needs the target, nothing is refused.
    file.write_text(f'{LONG}"HI"\n{LONG}"ME"\n')
    assert dry_run(overrides, file) == 0
    assert "2 of 2 prompts are cut" in caplog.text


def test_negative_prompts_are_counted_too(
    overrides: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "p.jsonl"
    rows = [{"prompt": "a", "negative_prompt": text} for text in (" ", "dark", LONG)]
    file.write_text("\n".join(map(json.dumps, rows)))
    assert dry_run(overrides, file, "rollout.pipeline.guidance_scale=3") == 0
    assert caplog.text.count("1 of 3 negative prompts are cut: they have more than") == 2
    assert f"the first is data.val_files: {file}, line 3" in caplog.text
    caplog.clear()
    assert dry_run(overrides, file) == 0
    assert "2 of 3 prompts bring a negative prompt, which has no effect without" in caplog.text
    assert "are cut" not in caplog.text


def test_a_dry_run_tells_sizes_repeats_and_the_package_s_held_out_prompts(
    overrides: list[str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "p.txt"
    file.write_text("a\nb\na\nc\nb\n")
    still = "the held-out prompts are those of the package"
    assert dry_run(overrides, file, "rollout.n=6", "trainer.total_training_steps=7") == 0
    out = capsys.readouterr().out
    assert "2 prompts (data.train_batch_size), each with 6 samples (rollout.n); 7 steps" in out
    for key in ("data.train_files", "data.val_files"):
        words = f"2 of 5 prompts repeat an earlier one; the first is {key}: {file}, line 3"
        assert words in caplog.text
    assert still not in caplog.text
    assert "rollout.val_kwargs.n=8: data.val_files has 5 prompts, and all of them" in caplog.text
    held_out = f"data.val_files={assets.path('prompts/glyph_val.txt')}"
    assert dry_run(overrides, file, held_out) == 0
    assert f"{held_out}: {still}" in caplog.text
    caplog.clear()
    trained = f"data.train_files={assets.path('prompts/glyph_train.txt')}"
    assert dry_run(overrides, file, held_out, trained) == 0
    assert dry_run(overrides, file, held_out, "trainer.test_freq=-1") == 0
    assert still not in caplog.text


def test_suites_are_checked_too(
    overrides: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.txt").write_text(f'a "HI"\n{LONG}"WORLD"\n')
    (tmp_path / "mine.yaml").write_text("prompts: own.txt\nreward: {terms: {ocr: {}}}\n")
    given = [*overrides, f"trainer.suites=[{tmp_path / 'mine.yaml'}]"]
    assert main(["train", "--dry-run", *given]) == 2
    assert "its target 'WORLD' lies behind" in capsys.readouterr().err


# Language models
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def chats(tmp_path: Path) -> list[str]:
    """Overrides of a small run whose prompts are chats, for a tokenizer with a template."""
    folder = shutil.copytree(assets.path("tiny_adder_lm"), tmp_path / "lm")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{% for m in messages %}{{ '+' + m.content }}{% endfor %}="
    tokenizer.save_pretrained(folder)
    rows = [
        {
            "prompt": [
                {"role": "system", "content": "12"},
                {"role": "user", "content": [{"type": "text", "text": f"{10 + number}"}]},
            ],
            "target": "9",
        }
        for number in range(8)
    ]
    file = tmp_path / "chats.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return [
        *SMALL_TEXT,
        f"model.path={folder}",
        f"data.train_files={file}",
        f"data.val_files={file}",
        "data.allow_overlap=true",
    ]


def test_a_run_shows_the_first_prompt_as_tokens_everywhere(
    chats: list[str], train_text: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = "7 tokens: '+' '1' '2' '+' '1' '0' '='"
    assert main(["train", "--dry-run", *chats]) == 0
    assert f"First prompt   {first}" in capsys.readouterr().out
    assert train_text(*chats, "trainer.total_training_steps=1", "trainer.test_freq=-1") == 0
    output = capsys.readouterr()
    assert f"first prompt: {first}" in " ".join((output.out + output.err).split())
    report = (tmp_path / "run" / "report.html").read_text()
    assert first.replace("'", "&#39;") in report


@pytest.mark.parametrize(
    ("further", "words"),
    [
        ("rollout.prompt_length=6", "chats.jsonl, line 1: rollout.prompt_length=6, but the prompt"),
        ("rollout.response_length=100", "response_length=100 are 116 tokens"),
        (
            "rollout.name=vllm_engine rollout.engine_kwargs.max_model_len=20",
            "engine_kwargs.max_model_len=20 allows 20",
        ),
        (
            "model.chat_template_kwargs.chat_template='{{messages+1}}'",
            "chats.jsonl, line 1: model.path: its tokenizer cannot read the chat",
        ),
        ("model.chat_template_kwargs.tokenize=false", "chat_template_kwargs.tokenize"),
    ],
)
def test_what_a_language_model_has_no_room_for(
    chats: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    further: str,
    words: str,
) -> None:
    monkeypatch.setattr("flowgrpo_rc.rollout.vllm_engine.find_spec", lambda name: True)
    assert main(["train", "--dry-run", *chats, *further.split(" ")]) == 2
    assert words in capsys.readouterr().err


def test_letters_that_a_tokenizer_does_not_know_are_counted(
    overrides: list[str], chats: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "chats.jsonl"
    file.write_text(file.read_text().replace("13", "Ж3").replace("14", "😀4"))
    assert main(["train", "--dry-run", *chats]) == 0
    said = "2 of 8 prompts have letters unknown to the tokenizer, which are all read alike"
    assert f"{said}; the first is data.train_files: {file}, line 4" in caplog.text
    caplog.clear()
    template = "model.chat_template_kwargs.chat_template='1='"
    assert main(["train", "--dry-run", *chats, template]) == 0
    assert "7 of 8 prompts become the same tokens as another prompt; the first is" in caplog.text
    caplog.clear()
    # T5's vocabulary lacks the letter, and CLIP's has every byte.
    file = tmp_path / "p.txt"
    file.write_text('a "HI"\na 猫 with "ME"\n')
    assert dry_run(overrides, file) == 0
    assert "1 of 2 prompts have letters unknown to tokenizer_3" in caplog.text
    assert caplog.text.count("unknown to") == 2  # of training and held-out prompts


@pytest.mark.parametrize(
    ("column", "value"),
    [("tools", [{"name": "add"}]), ("chat_template_kwargs", {"a": 1}), ("negative_prompt", "no")],
)
def test_a_column_that_is_not_read_is_ignored_in_words(
    chats: list[str],
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    column: str,
    value: object,
) -> None:
    file = tmp_path / "chats.jsonl"
    rows: list[dict[str, Any]] = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("\n".join(json.dumps(row | {column: value}) for row in rows))
    with caplog.at_level(logging.WARNING):
        assert main(["train", "--dry-run", *chats]) == 0
    assert f"{file}: the column {column} is ignored" in caplog.text
