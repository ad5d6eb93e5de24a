"""Prompt files, the order of prompts, and how processes share a step."""

from __future__ import annotations

import json
import sys

import pyarrow
import pytest
from pyarrow import parquet

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.data.prompts import PromptSampler, read_prompts, shard


def write(path, text: str):
    path.write_bytes(text.encode(errors="surrogateescape"))
    return path


def as_parquet(path, rows):
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def some_prompts(count: int) -> list[Prompt]:
    return [Prompt(text=f"prompt {index}", index=index) for index in range(count)]


# --- Files


def test_text_files(tmp_path):
    # Files that were joined have a mark each.
    text = '\ufeffa "CAFE" and "BAR"\r\n  a "New York" at night  \n\ufeffzwei "ÄÖ"\n\n \n'
    path = write(tmp_path / "a.txt", text)
    prompts = read_prompts(path, require_target=True, negative_text="blurry")
    assert [p.text for p in prompts] == ['a "CAFE" and "BAR"', 'a "New York" at night', 'zwei "ÄÖ"']
    assert [p.target for p in prompts] == ["CAFE", "New York", "ÄÖ"]
    assert [p.index for p in prompts] == [0, 1, 2]
    assert {p.negative_text for p in prompts} == {"blurry"}


def test_targets_are_optional_unless_required(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "a.txt", 'a cat\nan empty ""\nan "open\na "dog"')
    prompts = read_prompts("~/a.txt", require_target=False)
    assert [prompt.target for prompt in prompts] == [None, None, None, "dog"]


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ('A 6" wide sign that says "HELLO"', None),
        ('signs of 5" and "HELLO"', None),
        ('"HELLO" on a 5" card', None),
        ('a 4" x 6" card', None),
        ('a 4½" by 6" card that says "HELLO"', None),
        ('"ROUTE 66" on a sign', "ROUTE 66"),  # a quote that closes may follow a digit
        ('a sign "HELLO" on a 5" by 7" card', "HELLO"),
        ('a \\"big\\" sign that says \\"HELLO\\"', None),
        ('"a sign that says ""HELLO"""', None),
        ('a “HELLO" sign beside "OPEN”', None),
        ('a sign "„HELLO“"', "„HELLO“"),
    ],
)
def test_quotes_that_do_not_pair_up_are_no_target(tmp_path, text, target):
    """A target that is given decides; where no reward needs one, there is none."""
    lines = write(tmp_path / "a.txt", f"{text}\n")
    assert read_prompts(lines, require_target=False)[0].target == target
    rows = write(tmp_path / "a.jsonl", json.dumps({"prompt": text, "target": "OPEN"}))
    assert read_prompts(rows, require_target=True)[0].target == "OPEN"
    if target is None:
        message = r'line 1: .*(odd number of double|inch mark|curly ones).*: give the key "target"'
        for file in (lines, as_parquet(tmp_path / "a.parquet", [{"prompt": text}])):
            with pytest.raises(ValueError, match=message.replace("line", "(line|row)")):
                read_prompts(file, require_target=True)


ROWS = [
    {"prompt": 'a "CAFE"', "target": "Bistro", "negative_prompt": "dark", "source": "x", "id": 7},
    {"prompt": 'a "CAFE"', "target": None, "negative_prompt": None, "source": None, "id": 8},
]


def write_jsonl(path):
    return write(path, "\n".join(json.dumps(row) for row in ROWS))


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_jsonl_and_parquet_files(tmp_path, kind):
    path = tmp_path / f"a.{kind}"
    write_jsonl(path) if kind == "jsonl" else as_parquet(path, ROWS)
    found = read_prompts(path, require_target=True, negative_text="blurry")
    assert [(p.target, p.negative_text, p.metadata) for p in found] == [
        ("Bistro", "dark", {"source": "x", "id": 7}),
        ("CAFE", "blurry", {"source": None, "id": 8}),
    ]


def test_several_files_share_one_numbering(tmp_path):
    files = [write(tmp_path / "a.txt", "one\ntwo"), str(write_jsonl(tmp_path / "b.jsonl"))]
    assert [p.index for p in read_prompts(files, require_target=False)] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "", "has no prompt"),
        ("a.txt", 'a "b"\na plain line', "line 2: 'a plain line' has no target"),
        ("a.txt", 'a "b"\na "c', "line 2: .* has no target"),
        ("a.txt", 'a "b"\nan empty "" one', "line 2: .* has an empty target"),
        ("a.txt", 'a "b"\na blank " " one', "line 2: .* has an empty target"),
        ("a.csv", "a", r"ends in '.csv'; allowed: .txt, .jsonl, .parquet"),
        ("a.txt", 'a "caf\udce9"', "is not UTF-8"),
        ("a.jsonl", '{"prompt": "a \\"b\\""}\n{"prompt": ', "line 2 must be an object"),
        ("a.jsonl", '["a"]', "line 1 must be an object"),
        ("a.jsonl", '{"text": "a", "id": 1}', "line 1: the prompt is missing: .* has text, id"),
        ("a.jsonl", '{"prompt": "a", "prompt": "b"}', "line 1 .* it has 'prompt' twice"),
        ("a.txt", "a\0 \0c\0a\0t\0", "line 1: 'prompt' holds NUL: if this is UTF-16"),
        ("a.jsonl", r'{"prompt": "\\u0000", "x": ["\u0000"]}', "line 1: 'x' holds NUL"),
        ("a.txt", "\u200b", "line 1: the prompt is empty"),
        ("a.txt", 'a "\u200b"', "line 1: .* has an empty target"),
        ("a.jsonl", r'{"prompt": "a", "target": "\u2060\ufe0f"}', "line 1: .* has an empty target"),
        ("a.jsonl", '{"prompt": " "}', "line 1: the prompt is empty"),
        ("a.jsonl", '{"prompt": 3}', "line 1: prompt must be a text, got 3"),
        ("a.jsonl", r'{"prompt": "a \ud83d"}', r"line 1: 'prompt' holds '\\ud83d', .*no UTF-8"),
        ("a.jsonl", r'{"prompt": "a", "target": "\udc00"}', "line 1: 'target' .*no UTF-8"),
        ("a.jsonl", r'{"prompt": "a", "x": [{"y": "\udc00"}]}', "line 1: 'x' .*no UTF-8"),
        ("a.jsonl", r'{"prompt": "a", "x": {"\udc00": 1}}', "line 1: 'x' .*no UTF-8"),
        ("a.jsonl", '{"prompt": "a \\"b\\"", "target": ""}', "line 1: .* has an empty target"),
        ("a.jsonl", '{"prompt": "a \\"b\\"", "target": 5}', "line 1: target must be a text, got 5"),
        ("a.parquet", "not parquet", "cannot be read: "),
    ],
)
def test_bad_files_are_named(tmp_path, name, content, message):
    with pytest.raises(ValueError, match=message) as error:
        read_prompts(write(tmp_path / name, content), require_target=True, key="data.val_files")
    assert str(error.value).startswith(f"data.val_files: {tmp_path / name}")


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.txt", "a\n\n \nb\n\n", "2 lines from line 2 on are blank and skipped"),
        ("a.jsonl", '\n{"prompt": "a"}\n{"prompt": "b"}', "line 1 is blank and skipped"),
        ("a.txt", "a\nb\n\n\n", ""),
    ],
)
def test_blank_lines_are_skipped_and_counted_once(tmp_path, caplog, name, content, told):
    file = write(tmp_path / name, content)
    for _ in range(2):
        assert [one.text for one in read_prompts(file, require_target=False)] == ["a", "b"]
    said = [f"data.train_files: {file}: {told}"] if told else []
    assert [record.getMessage() for record in caplog.records] == said


def test_a_parquet_file_may_hold_bytes_where_text_belongs(tmp_path):
    broken = pyarrow.array([b"caf\xe9"]).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"prompt": broken}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"train_files: .*a\.parquet .*utf-8"):
        read_prompts(tmp_path / "a.parquet", require_target=False)


def test_damaged_parquet_is_named_whatever_the_library_raises(tmp_path):
    whole = as_parquet(tmp_path / "a.parquet", [{"prompt": f"cat {i}"} for i in range(99)])
    content = bytearray(whole.read_bytes())
    content[40:60] = b"\xff" * 20
    whole.write_bytes(content)
    late = pyarrow.table({"prompt": ["a"], "day": pyarrow.array([2**30], pyarrow.date32())})
    parquet.write_table(late, tmp_path / "b.parquet")
    for name in ("a", "b"):
        with pytest.raises(ValueError, match=rf"train_files: .*{name}\.parquet cannot be read: "):
            read_prompts(tmp_path / f"{name}.parquet", require_target=False)


@pytest.mark.parametrize("paths", [3, True, [None], {"a.txt": 1}, b"a.txt"])
def test_what_is_no_path_is_refused(paths):
    with pytest.raises(ValueError, match=r"data\.train_files=.*: give a prompt file, a folder"):
        read_prompts(paths, require_target=False)


def test_missing_file_and_no_file(tmp_path):
    with pytest.raises(ValueError, match=r"data\.train_files: there is no file .*b\.txt"):
        read_prompts([write(tmp_path / "a.txt", "x"), tmp_path / "b.txt"], require_target=False)
    with pytest.raises(ValueError, match=r"data\.train_files names no file"):
        read_prompts([], require_target=False)


def test_parquet_without_pyarrow_names_the_extra(tmp_path, monkeypatch):
    path = as_parquet(tmp_path / "a.parquet", ROWS)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r"train_files: .* needs pyarrow: pip install 'pyarrow>="):
        read_prompts(path, require_target=False)


# --- Datasets of flow_grpo and verl-omni

DOGS = {"include": [{"class": "dog", "count": 3}], "exclude": [{"class": "dog", "count": 4}]}
GENEVAL = [
    {"include": [{"class": "bus", "count": 1, "color": "red"}], "prompt": "a red bus"},
    DOGS | {"prompt": "three dogs"},
]
SYSTEM = {"role": "system", "content": "Describe the image."}


def verl_row(text: str, truth: object, **columns: object) -> dict:
    """Returns a row as verl-omni's preprocessing writes it."""
    return {
        "data_source": "flow_grpo/ocr",
        "prompt": [SYSTEM, {"role": "user", "content": text}],
        "negative_prompt": [SYSTEM, {"role": "user", "content": " "}],
        "ability": "ocr",
        "reward_model": {"style": "model", "ground_truth": truth},
        "extra_info": {"split": "train", "index": 3},
    } | columns


@pytest.fixture
def dataset(tmp_path):
    """A small copy of flow_grpo's `dataset` folder, with a verl-omni folder beside it."""
    for name in ("ocr", "geneval", "verl"):
        (tmp_path / name).mkdir()
    write(tmp_path / "ocr" / "train.txt", 'A sign "OPEN" in neon\nA cake "Happy Day"\n')
    write(tmp_path / "ocr" / "test.txt", 'A van "TAXI"\n')
    for split, rows in (("train", GENEVAL), ("test", GENEVAL[:1])):
        lines = "\n".join(json.dumps(row) for row in rows)
        write(tmp_path / "geneval" / f"{split}_metadata.jsonl", lines)
    rows = [verl_row('a "CAFE"', "CAFE"), verl_row("a shop", "Bistro")]
    as_parquet(tmp_path / "verl" / "train.parquet", rows)
    as_parquet(tmp_path / "verl" / "test.parquet", [verl_row('a "BAR"', "BAR")])
    return tmp_path


@pytest.mark.parametrize(
    ("folder", "train", "held_out"),
    [
        ("ocr", ['A sign "OPEN" in neon', 'A cake "Happy Day"'], ['A van "TAXI"']),
        ("geneval", ["a red bus", "three dogs"], ["a red bus"]),
        ("verl", ['a "CAFE"', "a shop"], ['a "BAR"']),
    ],
)
def test_a_folder_has_both_splits(dataset, folder, train, held_out):
    for key, texts in (("data.train_files", train), ("data.val_files", held_out)):
        found = read_prompts(dataset / folder, require_target=False, key=key)
        assert [prompt.text for prompt in found] == texts


def test_targets_and_metadata_reach_the_prompts(dataset):
    geneval = read_prompts(dataset / "geneval", require_target=False)
    assert [p.metadata | {"prompt": p.text} for p in geneval] == GENEVAL
    first, second = read_prompts(dataset / "verl", require_target=True, negative_text="blurry")
    assert (first.target, second.target) == ("CAFE", "Bistro")
    assert first.negative_text == " "
    assert first.metadata == {
        "data_source": "flow_grpo/ocr",
        "ability": "ocr",
        "reward_model": {"style": "model", "ground_truth": "CAFE"},
        "extra_info": {"split": "train", "index": 3},
        "system_prompt": "Describe the image.",
    }


def test_chats_in_json_lines_and_prompts_that_are_texts(tmp_path):
    rows = [
        verl_row("a cat", ""),
        verl_row("a dog", {"class": "dog"}, prompt="plain text"),
        {
            "prompt": [{"role": "user", "content": 'an "X"'}],
            "target": "own",
            "reward_model": {"ground_truth": "Y"},
        },
    ]
    path = write(tmp_path / "rows.jsonl", "\n".join(json.dumps(row) for row in rows))
    prompts = read_prompts(path, require_target=False)
    found = [(prompt.text, prompt.target) for prompt in prompts]
    assert found == [("a cat", None), ("plain text", None), ('an "X"', "own")]
    assert "system_prompt" not in prompts[1].metadata
    truths = ("Y", 7, ["Y", "Z"], None)
    rows = [verl_row("", truth, prompt='an "X"', target=None) for truth in truths]
    path = write(tmp_path / "rows.jsonl", "\n".join(json.dumps(row) for row in rows))
    found = [prompt.target for prompt in read_prompts(path, require_target=False)]
    assert found == ["Y", None, None, "X"]  # beside another truth no target is guessed
    with pytest.raises(ValueError, match=r"line 2: .* has an empty target"):
        read_prompts(path, require_target=True)
    assert prompts[1].metadata["reward_model"]["ground_truth"] == {"class": "dog"}


ALONE = "is a chat without a user message"
NO_CHAT = "must be a text, or a chat"


@pytest.mark.parametrize(
    ("chat", "of_image", "of_text"),
    [
        ([], ALONE, ALONE),
        ([SYSTEM], ALONE, ALONE),
        ([{"role": "user", "content": "a"}] * 2, NO_CHAT, None),
        ([{"role": "assistant", "content": "a"}], NO_CHAT, ALONE),
        ([{"role": "human", "content": "a"}], NO_CHAT, r"a role \(system, .*it has .*'human'"),
        ([{"from": "user", "value": "a"}], NO_CHAT, "a role"),
        ([{"role": "user", "content": None}], NO_CHAT, "a text as content"),
        ([{"role": "user", "content": 5}], NO_CHAT, "a text as content"),
        ([{"role": "user", "content": [{"type": "image", "text": "x"}]}], NO_CHAT, "a text as con"),
        (["hello"], NO_CHAT, "it has 'hello'"),
        ([{"role": "user", "content": " "}], "the prompt is empty", "the prompt is empty"),
        (json.dumps([SYSTEM]), "or an object that was written as text", "written as text"),
        (str([{"role": "user", "content": "a"}]), "written as text", "written as text"),
    ],
)
def test_chats_that_cannot_be_read_are_named(tmp_path, chat, of_image, of_text):
    path = write(tmp_path / "a.jsonl", '{"prompt": "fine"}\n' + json.dumps({"prompt": chat}))
    for chats, message in ((False, of_image), (True, of_text)):
        if message is not None:
            words = rf"data\.train_files: {path}, line 2: .*{message}"
            with pytest.raises(ValueError, match=words):
                read_prompts(path, require_target=False, chats=chats)


# --- Chats of a language model


def one_prompt(folder, kind: str, chat: object) -> Prompt:
    path = folder / f"a.{kind}"
    if kind == "jsonl":
        write(path, json.dumps({"prompt": chat}))
    else:
        as_parquet(path, [{"prompt": chat}])
    (prompt,) = read_prompts(path, require_target=False, chats=True)
    return prompt


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_language_model_gets_all_messages(tmp_path, kind):
    chat = [SYSTEM, *({"role": role, "content": role[0]} for role in ("user", "assistant"))]
    chat += [{"role": "user", "content": 'what is "2"?', "name": "ann"}]
    prompt = one_prompt(tmp_path, kind, chat)
    # In parquet every message has a `name`, which is null in the others.
    assert prompt.said == prompt.messages == tuple(chat)
    assert (prompt.text, prompt.target) == ('what is "2"?', None)  # a quote is no answer
    assert prompt.metadata == {"system_prompt": "Describe the image."}


def test_contents_in_parts_and_calls_of_tools(tmp_path):
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    answer = {"role": "tool", "content": "3"}
    prompt = one_prompt(tmp_path, "jsonl", [{"role": "user", "content": parts}, call, answer])
    assert prompt.text == prompt.messages[0]["content"] == "one two"
    assert prompt.messages[1:] == (call | {"content": ""}, answer)


def test_a_plain_text_and_an_image_prompt_have_no_messages(tmp_path):
    path = write(tmp_path / "a.jsonl", json.dumps({"prompt": "1+1="}))
    (prompt,) = read_prompts(path, require_target=False, chats=True)
    assert (prompt.messages, prompt.said) == ((), "1+1=")
    write(path, json.dumps(verl_row("a cat", "")))
    (prompt,) = read_prompts(path, require_target=False)
    assert (prompt.messages, prompt.said) == ((), "a cat")


def test_folders_without_a_file_or_with_several(dataset):
    with pytest.raises(ValueError, match=r"val_files: .* has none of test\.txt, .*: geneval, ocr"):
        read_prompts(dataset, require_target=False, key="data.val_files")
    write(dataset / "ocr" / "train.jsonl", json.dumps({"prompt": "a"}))
    with pytest.raises(ValueError, match=r"train_files: .* has train\.txt, train\.jsonl: give one"):
        read_prompts(dataset / "ocr", require_target=False)


# --- Order


@pytest.mark.parametrize(("count", "per_step"), [(12, 4), (10, 4), (7, 7), (3, 1)])
def test_every_epoch_is_a_permutation_in_any_order_of_steps(count, per_step):
    sampler = PromptSampler(some_prompts(count), per_step, seed=3)
    steps = [sampler.step(step) for step in range(3 * count)]
    stream = [prompt.index for step in steps for prompt in step]
    epochs = [stream[start : start + count] for start in range(0, len(stream), count)]
    assert len(epochs) == 3 * per_step
    assert all(sorted(epoch) == list(range(count)) for epoch in epochs)
    assert all(sampler.step(step) == steps[step] for step in (3 * count - 1, 0, 2))


def test_seed_and_epoch_change_the_order():
    prompts = some_prompts(50)
    orders = {
        tuple(p.index for p in PromptSampler(prompts, 50, seed=seed).step(step))
        for seed in (0, 1)
        for step in (0, 1)
    }
    assert len(orders) == 4


@pytest.mark.parametrize("per_step", [0, 4])
def test_too_few_prompts(per_step):
    with pytest.raises(ValueError, match=rf"_batch_size={per_step} must be between 1 and .* 3"):
        PromptSampler(some_prompts(3), per_step, seed=0)


# --- Processes


@pytest.mark.parametrize("world_size", [1, 2, 3, 6])
@pytest.mark.parametrize("mini_batch_size", [6, 12])
def test_mini_batches_do_not_depend_on_the_number_of_processes(world_size, mini_batch_size):
    prompts = some_prompts(12)
    share = mini_batch_size // world_size
    ranks = [
        shard(prompts, step=0, mini_batch_size=mini_batch_size, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    assert all([prompt.index for prompt in batch.prompts] == list(batch.slots) for batch in ranks)
    for k in range(12 // mini_batch_size):
        together = [slot for batch in ranks for slot in batch.slots[k * share : (k + 1) * share]]
        assert together == list(range(k * mini_batch_size, (k + 1) * mini_batch_size))
