"""Models and runs that other people give away run no code of theirs."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from support.faults import Ended, command, fault, forked, words_of

from flowgrpo_rc import Run, assets
from flowgrpo_rc.cli import main

# A module that leaves a file where it is imported, and has every name.
EVIL = """
import pathlib
pathlib.Path({mark!r}).touch()
def __getattr__(name):
    raise SystemExit("the code of a stranger ran")
"""


class Dropper:
    """Pickles as a call that leaves a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (self.mark,)


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """The file that appears if a stranger's code runs."""
    return tmp_path / "ran"


def say_yes() -> None:
    """Answers every question with yes."""
    reading, writing = os.pipe()
    os.write(writing, b"y\n" * 100)
    os.dup2(reading, 0)
    sys.stdin = os.fdopen(0, closefd=False)


def change(file: Path, **settings: object) -> None:
    """Changes settings in a JSON file; None removes one."""
    merged = json.loads(file.read_text()) | settings
    file.write_text(json.dumps({name: value for name, value in merged.items() if value}))


def own_network(model: Path) -> None:
    auto = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    change(model / "config.json", model_type="evil", auto_map=auto)


def own_tokenizer(model: Path) -> None:
    auto = {"AutoTokenizer": ["evil.Tokenizer", "evil.Tokenizer"]}
    change(model / "tokenizer_config.json", tokenizer_class="Evil", auto_map=auto)


def own_pipeline(model: Path) -> None:
    change(model / "model_index.json", _class_name=["evil", "Pipeline"])


def own_component(model: Path) -> None:
    change(model / "model_index.json", vae=["evil", "Autoencoder"])


def own_tokenizer_in_a_processor(model: Path) -> None:
    own_tokenizer(model / "tokenizer")
    (model / "tokenizer" / "preprocessor_config.json").write_text(
        '{"image_processor_type": "CLIPImageProcessor"}'
    )
    change(model / "tokenizer" / "tokenizer_config.json", processor_class="CLIPProcessor")
    change(model / "model_index.json", tokenizer=["transformers", "CLIPProcessor"])


def words_for(model: Path, small: list[str], run: Path) -> list[str]:
    """Returns the words of a training of a model of images or of texts."""
    if (model / "model_index.json").exists():
        return words_of(small, f"model.path={model}")
    return [
        "train",
        "--config-name",
        "token_grpo",
        f"model.path={model}",
        f"trainer.output_dir={run}",
    ]


@fault(
    "a model brings code, and the question whether to run it is answered with yes",
    "nothing asks, nothing of it is imported, and a line says so",
)
@pytest.mark.parametrize(
    ("kind", "harm"),
    [
        ("text", own_tokenizer),
        ("images", own_pipeline),
        ("images", own_component),
        ("images", own_tokenizer_in_a_processor),
    ],
)
def test_code_of_a_model(
    checkpoint: Path,
    tiny_lm: Path,
    small: list[str],
    tmp_path: Path,
    mark: Path,
    kind: str,
    harm: Callable[[Path], None],
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_lm if kind == "text" else checkpoint, model)
    for folder in (model, model / "vae", model / "tokenizer", Path.cwd()):
        if folder.is_dir():
            (folder / "evil.py").write_text(EVIL.format(mark=str(mark)))
    harm(model)
    ended = command(*words_for(model, small, tmp_path / "run"), harm=say_yes)
    assert not mark.exists()
    said = "needs Python code" if kind == "text" else "never run"
    assert ended.expect(2, said).error().startswith(f"error: model.path={model}")
    assert "[y/N]" not in ended.output


@fault("the weights of a model are pickles", "they are not opened, and a line names the model")
@pytest.mark.parametrize("kind", ["text", "images"])
def test_pickled_weights(
    checkpoint: Path, tiny_lm: Path, small: list[str], tmp_path: Path, mark: Path, kind: str
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_lm if kind == "text" else checkpoint, model)
    part = "transformer/diffusion_pytorch_model" if kind == "images" else "model"
    (model / f"{part}.safetensors").unlink()
    part = part if kind == "images" else "pytorch_model"
    (model / f"{part}.bin").write_bytes(pickle.dumps({"weight": Dropper(mark)}))
    ended = command(*words_for(model, small, tmp_path / "run"))
    assert not mark.exists()
    assert ended.code in (1, 2), ended.output
    assert str(model) in ended.error()


@fault("the head of the aesthetic reward is a pickle that runs code", "it is not run")
def test_a_pickled_head(small: list[str], tmp_path: Path, mark: Path) -> None:
    head = tmp_path / "head.pth"
    torch.save({"layers.0.weight": Dropper(mark)}, head)
    clip = assets.path("tiny_clip")
    term = f"reward.terms={{aesthetic: {{head: {head}, path: {clip}}}}}"
    ended = command(*words_of(small, term))
    assert not mark.exists()
    assert ended.code in (1, 2), ended.output


@fault("the tokenizer of a reward's model is code", "nothing asks, and nothing of it is imported")
def test_code_of_a_rewards_tokenizer(small: list[str], tmp_path: Path, mark: Path) -> None:
    clip = assets.path("tiny_clip")
    processor = tmp_path / "processor"
    shutil.copytree(clip, processor)
    (processor / "evil.py").write_text(EVIL.format(mark=str(mark)))
    own_network(processor)
    own_tokenizer(processor)
    term = f"reward.terms={{clip: {{path: {clip}, processor: {processor}}}}}"
    ended = command(*words_of(small, term), harm=say_yes)
    assert not mark.exists()
    assert ended.code == 1, ended.output
    assert f"path='{processor}' needs Python code" in ended.output
    assert "[y/N]" not in ended.output


# What a config.yaml may name, by the section that it is written into.
NAMED = {
    "class": ("reward.terms", {"odd": {"_target_": "evil.Odd"}}),
    "function": ("reward.terms", {"odd": {"_target_": "function", "path": "evil:odd"}}),
    "engine": ("rollout", {"name": "evil.Engine"}),
    "model": ("model", {"adapter": "evil.Model"}),
    "correction": ("algorithm.rollout_correction", {"custom_correction": "evil:correct"}),
    "loss": ("actor.diffusion_loss", {"loss_mode": "evil.Loss"}),
    "secret": ("reward.terms", {"remote": {"url": "https://evil.example", "token_env": "PATH"}}),
}


def plant(run: Path, section: str, settings: dict[str, object]) -> None:
    """Writes into a run's config.yaml what a stranger might, and code beside the run."""
    config = yaml.safe_load((run / "config.yaml").read_text())
    node = config
    for name in section.split("."):
        node = node[name]
    node.update(settings)
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    for folder in (run, Path.cwd()):
        (folder / "evil.py").write_text(EVIL.format(mark=str(run.parent / "ran")))


def resume(run: Path) -> Ended:
    """Resumes a run from Python."""

    def go_on() -> int:
        Run(run).resume()
        return 0

    return forked(go_on)


@fault(
    "a run that somebody gave away names code, or a secret of this machine",
    "eval and Run.resume list the settings before anything is imported, and ask for trust",
)
@pytest.mark.parametrize("what", NAMED)
def test_what_a_run_names(finished: Path, mark: Path, what: str) -> None:
    section, settings = NAMED[what]
    plant(finished, section, settings)
    ended = command("eval", str(finished)).expect(2)
    (line,) = ended.output.splitlines()
    assert f": {section}." in line
    assert "evil" in line or "token_env=PATH" in line
    assert line.endswith("give --trust")
    assert resume(finished).output.splitlines()[-1].endswith("give trust=True")
    assert not mark.exists()


@fault(
    "a run that somebody gave away reads the environment, ${oc.env:NAME}",
    "eval, export and Run.resume refuse",
)
def test_a_run_that_reads_the_environment(finished: Path) -> None:
    plant(finished, "trainer", {"experiment_name": "${oc.env:PATH}"})
    message = "trainer.experiment_name=${oc.env:PATH} stands for another value"
    for words in (["eval", str(finished), "--trust"], ["export", str(finished), "--out", "out"]):
        command(*words).expect(2, message)
    assert message in resume(finished).output


@fault(
    "a run that somebody gave away names code, or a secret of this machine",
    "export, report and compare import none of it; train refuses other settings than its own",
)
def test_commands_that_import_nothing(finished: Path, small: list[str], mark: Path) -> None:
    other = Path(shutil.copytree(finished, finished.parent / "other"))
    for section, settings in NAMED.values():
        plant(finished, section, settings)
    run, out = str(finished), str(finished.parent / "out")
    for words in (["report", run], ["compare", run, str(other)], ["export", run, "--out", out]):
        command(*words).expect(0)
    command(*words_of(small, "trainer.total_training_steps=4")).expect(
        2, "holds a run with other settings"
    )
    assert not mark.exists()


@fault(
    "a module lies in the working directory", "eval without trust does not look for modules there"
)
def test_the_working_directory_of_an_evaluation(finished: Path) -> None:
    def looks_here(*words: str) -> int:
        assert main(["eval", str(finished), *words]) == 0
        return int(str(Path.cwd()) in sys.path)

    assert forked(lambda: looks_here()).code == 0
    assert forked(lambda: looks_here("--trust")).code == 1


OWN_REWARD = """
def bright(image, prompt):
    return float(image.mean())
"""


@fault("a run names a reward of its user's own", "eval --trust imports it")
def test_own_code_with_trust(finished: Path) -> None:
    Path("own_reward.py").write_text(OWN_REWARD)
    term = {"bright": {"_target_": "function", "path": "own_reward:bright"}}
    plant(finished, "reward.terms", term)
    command("eval", str(finished), "--trust").expect(0, "bright")

    def go_on() -> int:
        functions = {"bright": lambda image, prompt: 1.0}
        Run(finished).resume(["trainer.total_training_steps=4"], rewards=functions)
        return 0

    # A function of the caller needs no trust, and comes before that of the folder.
    ended = forked(go_on)
    assert "holds a run with other settings" in ended.output
    assert "given:bright" in ended.output


@fault("a run's folder holds links where temporary files would be", "the files behind them stay")
def test_links_to_other_files(finished: Path, small: list[str], tmp_path: Path) -> None:
    precious = tmp_path / "precious.txt"
    names = (".report.html.tmp", ".config.yaml.tmp", ".inputs.json.tmp", ".lock")
    for name in names:
        (finished / name).unlink(missing_ok=True)
        (finished / name).symlink_to(precious)
    precious.write_text("mine")
    (finished / ".metrics.jsonl.tmp").symlink_to(tmp_path / "new.txt")
    (finished / "checkpoints" / ".partial_step_9").symlink_to(tmp_path)
    for words in (["report", str(finished)], words_of(small)):
        ended = command(*words)
        assert "Traceback" not in ended.output
        assert ended.code in (0, 1)
    (finished / ".lock").unlink(missing_ok=True)
    (finished / "checkpoints" / "step_3" / "state.json").unlink()
    command(*words_of(small)).expect(0)
    assert not (finished / "config.yaml").is_symlink()
    assert precious.read_text() == "mine"
    assert not (tmp_path / "new.txt").exists()
