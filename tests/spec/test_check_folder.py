"""Which run a command may go on with: the same settings, the same contents, the same length."""

from __future__ import annotations

import dataclasses
import importlib
import json
import linecache
import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml
from support.compositions import job, job_spec, resolved

from flowgrpo_rc import assets
from flowgrpo_rc.config.tree import Config, stored_config
from flowgrpo_rc.records.checkpoint import Checkpoint, save_checkpoint
from flowgrpo_rc.records.inputs import Input
from flowgrpo_rc.records.run_folder import RunFolder
from flowgrpo_rc.spec.check_folder import checkpoint_to_resume
from flowgrpo_rc.spec.check_inputs import inputs_of, prompts_of

CONSTANT = "actor.optim.lr_scheduler=constant"


def read_by(config: Config) -> dict[str, Input]:
    return inputs_of(resolved(config), prompts_of(resolved(config)))


def made(config: Config) -> RunFolder:
    """Makes the folder of a run that has taken all of its steps."""
    folder = RunFolder(Path(config.trainer.output_dir))
    folder.create(dataclasses.asdict(config), torch.device("cpu"), 1, read_by(config))
    step = config.trainer.total_training_steps
    save_checkpoint(folder.checkpoints, Checkpoint(step=step, tensors={}, state={}), keep=1)
    return folder


def goes_on(config: Config) -> bool:
    return checkpoint_to_resume(config, read_by(config)) is not None


@pytest.fixture
def own(tmp_path: Path) -> list[str]:
    """Settings of a run with prompts of its own."""
    (tmp_path / "words.txt").write_text("".join(f'"{word}"\n' for word in "ABCDEFGH"))
    return [f"data.train_files={tmp_path / 'words.txt'}", f"trainer.output_dir={tmp_path / 'run'}"]


def test_the_folder_names_bundled_files_and_no_path_of_this_installation(own: list[str]) -> None:
    config = job(*own)
    folder = made(config)
    stored = yaml.safe_load(folder.config.read_text())
    assert stored["model"]["path"] == "${asset:tiny_glyph_sd3}"
    assert stored["data"]["val_files"] == "${asset:prompts/glyph_val.txt}"
    assert stored["data"]["train_files"] == own[0].partition("=")[2]
    assert str(assets.ROOT) not in folder.config.read_text() + folder.inputs.read_text()
    assert stored_config(folder.config) == config
    assert goes_on(config)


def test_a_key_of_another_version_is_named(own: list[str]) -> None:
    config = job(*own)
    folder = made(config)
    tree = dataclasses.asdict(config)
    tree["rollout"]["reuse"] = 0
    folder.config.write_text(yaml.safe_dump(tree))
    with pytest.raises(ValueError, match=r"config\.yaml: Key 'reuse' not in 'RolloutConfig'"):
        stored_config(folder.config)


def test_a_file_that_was_cut_at_the_end_of_a_line_is_damaged(own: list[str]) -> None:
    config = job(*own)
    folder = made(config)
    lines = folder.config.read_text().splitlines(keepends=True)
    for count in (1, len(lines) // 3, len(lines) // 2, len(lines) - 2, len(lines) - 1):
        folder.config.write_text("".join(lines[:count]))
        for reads in (stored_config, lambda path: goes_on(config)):
            with pytest.raises(ValueError, match=r"config\.yaml is damaged"):
                reads(folder.config)
    folder.config.write_text("".join(lines))
    assert goes_on(config)


def test_an_asset_that_this_version_lacks_is_named(own: list[str]) -> None:
    folder = made(job(*own))
    folder.config.write_text(folder.config.read_text().replace("tiny_glyph_sd3", "tiny_old"))
    with pytest.raises(ValueError, match="no bundled asset 'tiny_old'"):
        stored_config(folder.config)


def test_a_file_whose_content_changed_is_named(own: list[str], tmp_path: Path) -> None:
    config = job(*own)
    made(config)
    words_file = tmp_path / "words.txt"
    words_file.write_text(words_file.read_text().replace("B", "X"))
    words = r"data\.train_files: the content of .*words\.txt has changed"
    with pytest.raises(ValueError, match=words):
        goes_on(config)


def test_another_path_to_the_same_content_is_no_other_setting(
    own: list[str], checkpoint: Path, tmp_path: Path
) -> None:
    folder = made(job(*own, f"model.path={checkpoint}"))
    moved = tmp_path / "moved"
    shutil.copytree(checkpoint, moved / "model")
    shutil.copy(tmp_path / "words.txt", moved)
    there = [f"data.train_files=[{moved / 'words.txt'}]", own[1], f"model.path={moved / 'model'}"]
    assert goes_on(job(*there))
    (moved / "model" / "vae" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"model\.path: .* there, .* now; model\.path/vae/config"):
        goes_on(job(*there))
    folder.inputs.unlink()
    with pytest.raises(ValueError, match=r"data\.train_files: .* there, .* now"):
        goes_on(job(*there))


def test_weights_of_a_model_and_of_a_reward_are_compared(
    own: list[str], checkpoint: Path, tmp_path: Path
) -> None:
    scorer = tmp_path / "scorer"
    scorer.mkdir()
    (scorer / "config.json").write_text("{}")
    config = job(*own, f"model.path={checkpoint}")
    config.reward.terms = {"ocr": {"weight": 1.0}, "gone": None}
    config.reward.terms["x"] = {"_target_": "clip", "path": str(scorer)}
    names = set(inputs_of(resolved(config), prompts_of(job_spec(*own))))
    assert "model.path/transformer/diffusion_pytorch_model.safetensors" in names
    assert "reward.terms.x.path/config.json" in names


def test_the_source_of_a_reward_of_the_user_is_compared(
    own: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    source = "def score(sample, prompt):\n    return 1.0\n"
    source += "class Mine(Reward):\n    def __call__(self, samples, prompts): return 1\n"
    file = tmp_path / "scores_of_mine.py"
    top = "from flowgrpo_rc.rewards.base import Reward\n"
    file.write_text(top + source)
    terms = "{f: {_target_: function, path: 'scores_of_mine:score'}"
    config = job(*own, f"reward.terms={terms}, c: {{_target_: scores_of_mine.Mine}}}}")
    made(config)
    assert goes_on(config)

    def write(content: str) -> None:
        file.write_text(top + content)
        linecache.clearcache()
        importlib.reload(sys.modules["scores_of_mine"])

    write("OTHER = 1\n" + source)
    assert goes_on(config)
    for before, after, code in (("1.0", "2.0", "score"), ("return 1\n", "return 2\n", "Mine")):
        write(source.replace(before, after))
        words = rf"reward\.terms\.\w: the content of scores_of_mine\.{code} has changed"
        with pytest.raises(ValueError, match=words):
            goes_on(config)


def test_a_run_with_a_constant_learning_rate_may_become_longer(own: list[str]) -> None:
    made(job(*own, CONSTANT, "trainer.total_training_steps=2"))
    assert goes_on(job(*own, CONSTANT, "trainer.total_training_steps=5"))


PROGRAMS = {
    "/bin/flowgrpo-rc train": "flowgrpo-rc train",
    "/x/flowgrpo_rc/train.py": "flowgrpo-rc train",
    "/x/flowgrpo_rc/__main__.py train": "flowgrpo-rc train",
    "/mine/train.py": "train.py",
}


def test_another_length_of_a_schedule_is_refused_with_the_command_that_goes_on(
    own: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    longer = [*own, "trainer.total_training_steps=5"]
    shorter = job(*own, "trainer.total_training_steps=2")
    folder = made(shorter)
    for program, typed in PROGRAMS.items():
        monkeypatch.setattr(sys, "argv", [*program.split(), *longer])
        folder.create(dataclasses.asdict(shorter), torch.device("cpu"), 1, read_by(shorter))
        environment = json.loads((folder.root / "environment.json").read_text())
        assert environment["command"] == f"{typed} {' '.join(longer)}"
    words = r"total_training_steps=5: the run in .* has 2, .*lr_scheduler=linear.*; give 2, "
    words += r"or another trainer\.output_dir for a fresh run$"
    with pytest.raises(ValueError, match=words):
        goes_on(job(*longer))
    folder.lora.mkdir()
    changes = f"model.lora_path={folder.lora} trainer.output_dir={folder.root}_2"
    words = f"to train on from its LoRA, add trainer.total_training_steps=3 {changes}"
    with pytest.raises(ValueError, match=f"{words}$"):
        goes_on(job(*longer))
