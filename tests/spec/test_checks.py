"""A prompt that a reward cannot score is named with its file and line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.compositions import job_spec

from flowgrpo_rc.spec.check_inputs import check_inputs

DOG = {"class": "dog", "count": 1}
GENEVAL = ["ocr=null", "geneval.url=http://127.0.0.1:1"]


@pytest.mark.parametrize("key", ["data.train_files", "data.val_files"])
@pytest.mark.parametrize(
    ("terms", "good", "bad", "words"),
    [
        (["ocr.weight=1.0"], {"target": "Café"}, {"target": "AÑO"}, "ocr: .*write 'ñ' of"),
        (GENEVAL, {"include": json.dumps([DOG])}, {"include": "a dog"}, r"geneval: .*include must"),
    ],
)
def test_a_prompt_that_a_reward_cannot_score_is_named_with_its_line(
    tmp_path: Path, key: str, terms: list[str], good: dict, bad: dict, words: str
) -> None:
    """Before a model is loaded, and the first one of a file."""
    small = ["data.train_batch_size=1", "actor.ppo_mini_batch_size=1", "trainer.num_processes=1"]
    settings = [f"trainer.output_dir={tmp_path}/run", *small, *[f"reward.terms.{x}" for x in terms]]
    for name in ("data.train_files", "data.val_files"):
        rows = [good, *[bad] * 9] if name == key else [good] * 3
        file = tmp_path / f"{name}.jsonl"
        file.write_text("\n".join(json.dumps({"prompt": name} | row) for row in rows))
        settings.append(f"{name}={file}")
    with pytest.raises(
        ValueError, match=rf"{key}: .*jsonl, line 2: reward\.terms\.{words}"
    ) as error:
        check_inputs(job_spec(*settings))
    assert str(error.value).endswith("; 8 more of 10 prompts: line 3, line 4, ...")
    (tmp_path / f"{key}.jsonl").write_text(json.dumps({"prompt": key} | good))
    check_inputs(job_spec(*settings))
