"""The bundled prompts of real models: what the script writes, and whether it fits the rewards."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from bundled_models.write_prompts import write

from flowgrpo_rc import assets
from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.data.prompts import read_prompts
from flowgrpo_rc.rewards.geneval import _wishes

FILES = ("signs_train.txt", "signs_val.txt", "objects.jsonl", "scenes.jsonl")


def read(name: str) -> list[Prompt]:
    path = assets.path(f"prompts/{name}")
    return read_prompts(path, require_target=name.startswith("signs"))


def test_the_script_writes_the_bundled_files(tmp_path: Path) -> None:
    write(tmp_path / "prompts")
    assert {path.name for path in (tmp_path / "prompts").iterdir()} == set(FILES)
    for name in FILES:
        written = (tmp_path / "prompts" / name).read_bytes()
        assert written == assets.path(f"prompts/{name}").read_bytes()


def test_signs_are_many_and_none_comes_twice() -> None:
    train, val = read("signs_train.txt"), read("signs_val.txt")
    assert (len(train), len(val)) == (1000, 200)
    both = [*train, *val]
    assert len({prompt.text for prompt in both}) == 1200
    targets = [prompt.target.lower() for prompt in both if prompt.target]
    # No text of the held-out prompts is trained on.
    assert len(set(targets)) == 1200
    scenes = {prompt.text.replace(f'"{prompt.target}"', "X") for prompt in both}
    assert len(scenes) > 300
    words = {word for target in targets for word in target.split()}
    assert len(words) > 200
    assert min(len(target.split()) for target in targets) >= 1
    assert max(len(target) for target in targets) <= 40
    assert all(prompt.text.count('"') == 2 for prompt in both)


@pytest.mark.parametrize(
    ("name", "key", "number"), [("objects.jsonl", "tag", 24), ("scenes.jsonl", "category", 16)]
)
def test_categories_are_equally_large_and_in_turn(name: str, key: str, number: int) -> None:
    prompts = read(name)
    assert len({prompt.text for prompt in prompts}) == len(prompts)
    groups = [prompt.metadata[key] for prompt in prompts]
    assert set(Counter(groups).values()) == {number}
    kinds = len(set(groups))
    assert len(set(groups[:kinds])) == kinds


def test_what_objects_ask_for_is_what_the_reward_reads() -> None:
    for line in assets.path("prompts/objects.jsonl").read_text().splitlines():
        row = json.loads(line)
        prompt = Prompt(text=row["prompt"], index=0, metadata=row)
        include, exclude = _wishes(prompt)
        assert bool(exclude) == (row["tag"] == "counting")
        for wish in include:
            assert wish.name.split()[-1][:3] in prompt.text
            assert wish.color is None or f"{wish.color} {wish.name}" in prompt.text
            if wish.position is not None:
                side, index = wish.position
                end = prompt.text.partition(f"{wish.name} {side} ")[2]
                assert end.endswith(include[index].name)
