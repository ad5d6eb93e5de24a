"""Gives wrong input, which is answered with the key and exit code 2 before anything loads."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants
from support.launching import ROOT, ran

from flowgrpo_rc.cli import main
from flowgrpo_rc.config.foreign import foreign
from flowgrpo_rc.config.names import config_folder
from flowgrpo_rc.config.tree import FREE_FORM, known_keys

# Words behind `flowgrpo-rc train`, and words of the message.
WRONG = [
    ("nokey=1", ["unknown key nokey", "there is no such section or group; there are actor, "]),
    ("diffusion/engine=x", ["unknown key diffusion/engine", "there are actor, "]),
    ("+experiment=sd35", ["no 'sd35' (did you mean 'sd35_medium_", "); all are in {configs}/exp"]),
    ("--config-name=tiny_orc", ["no 'tiny_orc' (did you mean 'tiny_ocr'?); all are in {configs}"]),
    ("num_generations=8", ["unknown key num_generations: here that is rollout.n"]),
    ("sample.num_image_per_prompt=8", ["num_image_per_prompt: here that is rollout.n"]),
    ("learning_rate=1", ["here that is actor.optim.lr"]),
    ("per_device_train_batch_size=1", ["here that is actor.ppo_micro_batch_size_per_gpu"]),
    ("actor.ppo_micro_batch_size_per_gpu=5", ["the 12 samples", ": give 4 or 6"]),
    ("train_batch_size=4", ["is actor.ppo_micro_batch_size_per_gpu", "or data.train_batch_size"]),
    ("mix_beta=1", ["here that is actor.diffusion_loss.beta=..."]),
    ("train.beta=1", ["here that is actor.use_kl_loss=true actor.kl_loss_coef"]),
    ("+calibration=measured", ["unknown key calibration", "the groups of a --config-dir"]),
    ("trainer.suites=[a", ["'trainer.suites=[a' is no setting: write key=value, close each br"]),
    ('trainer.experiment_name="a', ["is no setting: write key=value, close each bracket"]),
    ("trainer.experiment_name=“a”", ["is no setting: “ is no quote here; write key=value"]),
    ("model.lora_rnk=5", ["did you mean model.lora_rank"]),
    ("rollout.name=difusers", ["rollout.name=difusers", "did you mean 'diffusers'"]),
    ("reward.terms.ocrr.weight=1", ["reward.terms.ocrr", "did you mean 'ocr'"]),
    ("reward.terms.ocr.weigth=1", ["reward.terms.ocr.weigth", "did you mean 'weight'"]),
    ("reward.terms.ocr.treads=1", ["reward.terms.ocr.treads", "did you mean 'threads'"]),
    ("+correction=nope", ["+correction=nope", "centered, pure_is, recomputed"]),
    ("+correction=centred", ["did you mean 'centered'"]),
    ("correction=centered", ["+correction=centered"]),
    (
        "data.negative_prompt=a blurry photo rollout.n=4",
        ["'blurry' is no setting", "'data.negative_prompt=a blurry photo'"],
    ),
    ("5", ["'5' is no setting", "key=value"]),
    ("data.train_files=dataset/ocr", ["data.train_files", "no file or folder dataset/ocr"]),
    ("model.path=model.safetensors", ["model.path=model.safetensors", "from_single_file"]),
    (
        "reward.terms.f._target_=function reward.terms.f.path=math:sqrt",
        ["reward.terms.f", "math:sqrt", "(x, /)", "a sample and its prompt"],
    ),
    ("trainer.logger=[console,wandb]", ["trainer.logger", "wandb login", "WANDB_MODE=offline"]),
]


# Runs command lines, and prints the code and the last words of each, and what was imported.
PROGRAM = """
import contextlib, io, json, sys
from flowgrpo_rc.cli import main
answers = []
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()) as said:
        code = main(words)
    answers.append((code, (said.getvalue().splitlines() or [""])[-1]))
names = [name for name in ("diffusers", "transformers", "peft") if name in sys.modules]
print(json.dumps([answers, names]))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """What one process in an empty folder without logins answers to each line.

    It takes no library of models, which costs seconds.
    """
    folder = tmp_path_factory.mktemp("empty")
    lines = {line: ["train", *line.split(" "), "trainer.device=cpu"] for line, _ in WRONG}
    others = ("eval nofolder", "export nofolder --out x", "report nofolder", "compare a b")
    lines |= {line: line.split() for line in (*others, "train --cfg job")}
    logins = ("WANDB_API_KEY", "WANDB_MODE", "NETRC")
    environment = {name: value for name, value in os.environ.items() if name not in logins}
    environment |= {"HOME": str(folder), "PYTHONPATH": str(ROOT)}
    words = json.dumps([*lines.values()])
    done = ran(sys.executable, "-c", PROGRAM, words, cwd=folder, env=environment)
    found, names = json.loads(done.stdout.splitlines()[-1])
    assert names == []
    return {line: tuple(answer) for line, answer in zip(lines, found, strict=True)}


@pytest.mark.parametrize(("line", "message"), WRONG, ids=[line for line, _ in WRONG])
def test_a_wrong_setting_is_named(
    answers: dict[str, tuple[int, str]], line: str, message: list[str]
) -> None:
    code, error = answers[line]
    assert code == 2, error
    assert error.startswith("error: ")
    for words in message:
        assert words.replace("{configs}", str(config_folder())) in error


def test_commands_about_runs_name_what_is_no_run(answers: dict[str, tuple[int, str]]) -> None:
    codes = [code for line, (code, _) in answers.items() if line not in dict(WRONG)]
    assert codes == [2, 2, 2, 2, 0]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("train --steps 5", "here trainer.total_training_steps=..."),
        ("train --steps=5", "here trainer.total_training_steps=..."),
        ("train rollout.n=4 --lr 1e-4", "here actor.optim.lr=..."),
        ("train --instance_prompt='a photo of sks dog'", "here data.train_files=..."),
        ("train --dry_run", "did you mean '--dry-run'"),
        ("train --colour", "settings are written key=value"),
        ("eval run --steps 5", "there is no option --steps"),
        ("train -m rollout.n=4,8", "there is no option -m: for a sweep call flowgrpo_rc.train"),
        ("trian", "invalid choice: 'trian'"),
        ("eval", "required: run_dir\n"),
    ],
)
def test_an_option_that_is_not_there(
    capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(shlex.split(line))
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_options_of_other_programs_lead_to_settings_that_exist() -> None:
    texts = foreign()["peers"].values()
    keys = [word.partition("=")[0] for text in texts for word in text.split() if "=" in word]
    assert len(keys) > 60
    assert [key for key in keys if key not in known_keys() and not key.startswith(FREE_FORM)] == []


def test_options_stand_anywhere(overrides: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    half = len(overrides) // 2
    assert main(["train", *overrides[:half], "--dry-run", *overrides[half:]]) == 0
    assert main(["train", *overrides, "--cfg", "job", "model.lora_rank=9"]) == 0
    shown = capsys.readouterr().out
    assert "8 training prompts" in shown
    assert "lora_rank: 9" in shown


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out.startswith("flowgrpo-rc 0.")


# What this machine lacks
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("libGL.so.1: cannot open shared object file", "apt-get install libgl1"),
        ("No module named 'onnxruntime'", "pip install"),
    ],
)
def test_the_ocr_engine_cannot_start(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    missing: str,
    message: str,
) -> None:
    (tmp_path / "rapidocr.py").write_text(f"raise ImportError({missing!r})")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "rapidocr", raising=False)
    assert main(["train", "trainer.device=cpu", f"trainer.output_dir={tmp_path / 'run'}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: reward.terms.ocr: the OCR engine rapidocr cannot start")
    assert missing in error
    assert message in error


@pytest.mark.parametrize("command", [["train", "--dry-run"], ["plan"]], ids=["train", "plan"])
def test_a_model_of_the_hub_without_network(
    overrides: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: list[str],
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert main([*command, *overrides, "model.path=someone/something"]) == 2
    error = capsys.readouterr().err
    assert "model.path=someone/something: it is not in the local cache" in error
    assert "HF_HUB_OFFLINE" in error


def test_a_plan_needs_no_prompts(
    overrides: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    files = ("data.train_files=null", f"data.val_files={tmp_path / 'nothing'}")
    assert main(["plan", *overrides, *files]) == 0, capsys.readouterr().err


def test_a_server_needs_a_token(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("FLOWGRPO_REWARD_TOKEN", raising=False)
    assert main(["serve-reward", "ocr"]) == 2
    assert "set FLOWGRPO_REWARD_TOKEN, or name the variable" in capsys.readouterr().err
