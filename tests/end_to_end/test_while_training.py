"""Tests what a run leaves while it goes on: pictures, the best weights, exports, uploads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from huggingface_hub import ModelCard, constants
from support.hub import TOKEN, Hub
from support.launching import launch
from support.runs import Train, Trained, final_state, read_rows, stopped_and_whole

from flowgrpo_rc.commands.export import export_checkpoint
from flowgrpo_rc.records.checkpoint import list_checkpoints
from flowgrpo_rc.records.samples import read_grid
from flowgrpo_rc.records.trackers import Trackers


@pytest.mark.slow
def test_four_prompts_are_drawn_between_evaluations(
    trained: Trained, train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They cost the run no bit, and are those of its evaluations; trackers get them too."""
    told: list[int] = []
    monkeypatch.setattr(Trackers, "log_image", lambda self, step, name, image: told.append(step))
    run = tmp_path / "run"
    settings = ("trainer.val_before_train=false", "trainer.test_freq=2")
    assert train(*settings, "trainer.sample_freq=1", f"trainer.output_dir={run}") == 0
    assert told == [0, 1, 2]
    drawn = sorted(path.name for path in (run / "samples").iterdir())
    assert drawn == ["drawn_000000.png", "drawn_000001.png", "step_000002.png"]
    plain = trained(*settings)
    assert final_state(run) == final_state(plain)
    before = read_grid(trained() / "samples" / "step_000000.png")[:4]
    first = read_grid(run / "samples" / drawn[0])
    assert [tile[1:] for tile in first] == [tile[1:] for tile in before]
    assert [tile.image.tobytes() for tile in first] == [tile.image.tobytes() for tile in before]


WANDERING = """
import hashlib

def wandering(image, prompt):
    return hashlib.sha256(image.tobytes()).digest()[0] / 255
"""


@pytest.fixture
def wander(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Settings of a run whose held-out reward rises and falls by chance, always the same."""
    (tmp_path / "wander.py").write_text(WANDERING)
    monkeypatch.syspath_prepend(tmp_path)
    term = "reward.terms.wandering"
    reward = (f"{term}._target_=function", f"{term}.path=wander:wandering")
    steps = ("trainer.total_training_steps=5", "trainer.test_freq=1", "trainer.save_freq=0")
    further = ("trainer.val_before_train=false", "trainer.max_checkpoints_to_keep=1")
    return (*reward, "reward.terms.jpeg=null", *steps, *further)


def evaluations(run: Path) -> list[float]:
    """Returns the held-out reward of each step, from the first."""
    return [row["val/reward"] for row in read_rows(run)]


@pytest.mark.slow
def test_the_best_checkpoint_stays_and_loras_are_exported_and_pushed(
    train: Train,
    tmp_path: Path,
    wander: tuple[str, ...],
    hub: Hub,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "ENDPOINT", hub.address)
    run = tmp_path / "run"
    pushed = ("trainer.push_to_hub=me/lora", "trainer.export_freq=2")
    assert train(*wander, *pushed, f"trainer.output_dir={run}") == 0
    rewards = evaluations(run)
    best = rewards.index(max(rewards)) + 1
    assert 1 < best < 5  # or the run shows nothing
    kept = [path.name for path in list_checkpoints(run / "checkpoints")]
    assert kept == [f"step_{best}", "step_5"]
    assert f"best {max(rewards):.4f} at step {best}" in (run / "report.html").read_text()

    name = "pytorch_lora_weights.safetensors"
    exports = {"lora_best": best, "lora": 5}
    exports |= {f"lora/step_{step}": step for step in (2, 4)}
    assert {path.name for path in (run / "lora").glob("*step*")} == {"step_2", "step_4"}
    for folder, step in exports.items():
        card = ModelCard.load(run / folder / "README.md")
        assert f"| steps | {step} of 5" in card.text
        inside = ', subfolder="lora_best"' if folder == "lora_best" else ""
        assert f'pipe.load_lora_weights("me/lora", weight_name="{name}"{inside})' in card.text
        pictures = [one["output"]["url"] for one in card.data.to_dict()["widget"]]
        assert len(pictures) == 4
        assert all(read_png(run / folder / picture) for picture in pictures)
        if step in (best, 5):
            again = tmp_path / f"again_{step}"
            export_checkpoint(str(run / "checkpoints" / f"step_{step}"), str(again), raw=False)
            assert (again / name).read_bytes() == (run / folder / name).read_bytes()

    commits = [body for path, body in hub.posted if "/commit/" in path][-2:]
    for body, step, place in zip(commits, (5, best), ("", "lora_best/"), strict=True):
        lines = [json.loads(line) for line in body.splitlines()]
        assert lines[0]["value"]["summary"] == f"LoRA of step {step}"
        sent = {line["value"]["path"].removeprefix(place) for line in lines[1:]}
        assert sent == {name, "README.md", *(f"images/{number}.png" for number in range(4))}
    assert TOKEN not in caplog.text
    assert not any(TOKEN in body for _, body in hub.posted)


def read_png(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_patience_ends_a_run_and_a_resumed_one_after_the_same_step(
    train: Train, tmp_path: Path, wander: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """A push that fails ends no run."""
    impatient = (*wander, "trainer.patience=1", "trainer.push_to_hub=me/lora")
    stopped = stopped_and_whole(train, tmp_path, *impatient)
    rewards = evaluations(stopped)
    end = len(rewards)
    assert 2 <= end < 5  # or the run shows nothing
    assert rewards[-1] <= rewards[-2]
    assert rewards[:-1] == sorted(set(rewards[:-1]))
    told = capsys.readouterr()
    assert "no better held-out reward in 1 evaluations (trainer.patience)" in told.out + told.err
    assert f"held-out reward {max(rewards):.4f}, step {end - 1}" in told.out + told.err
    assert train(*impatient, f"trainer.output_dir={stopped}") == 0
    told = capsys.readouterr()
    assert "raise trainer.patience" in told.out + told.err
    assert len(evaluations(stopped)) == end


@pytest.mark.slow
def test_two_processes_keep_the_best_once_and_lose_patience_after_the_same_step(
    overrides: list[str], wander: tuple[str, ...], tmp_path: Path
) -> None:
    settings = (*overrides, *wander, "trainer.patience=1", "trainer.save_rollouts=true")
    command = ("-m", "flowgrpo_rc.train", *settings)
    done = launch(2, *command, python_path=tmp_path)
    run = tmp_path / "run"
    rewards = evaluations(run)
    end = len(rewards)
    assert 2 <= end < 5  # or the run shows nothing
    assert rewards[-1] <= rewards[-2]
    assert done.stdout.count("best LoRA (held-out") == 1
    kept = [path.name for path in list_checkpoints(run / "checkpoints")]
    assert kept == [f"step_{end - 1}", f"step_{end}"]
    assert f"| steps | {end - 1} of 5" in (run / "lora_best" / "README.md").read_text()
    trained = {path.stem for path in (run / "rollouts").iterdir()}
    steps, ranks = range(1, end + 1), range(2)
    assert trained == {f"step_{step:06d}_process_{rank}_of_2" for step in steps for rank in ranks}
    again = launch(2, *command, python_path=tmp_path)
    assert again.stdout.count("raise trainer.patience") == 1
    assert len(evaluations(run)) == end
