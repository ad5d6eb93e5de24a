"""The bundled prompts of real models: what the script writes, and whether it fits the rewards."""

from __future__ import annotations

import json
from pathlib import Path

from bundled_models.write_prompts import write

from flowgrpo_rc import assets
from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.rewards.geneval import _wishes

FILES = ("signs_train.txt", "signs_val.txt", "objects.jsonl", "scenes.jsonl")


def test_the_script_writes_the_bundled_files(tmp_path: Path) -> None:
    write(tmp_path / "prompts")
    assert {path.name for path in (tmp_path / "prompts").iterdir()} == set(FILES)
    for name in FILES:
        written = (tmp_path / "prompts" / name).read_bytes()
        assert written == assets.path(f"prompts/{name}").read_bytes()


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
