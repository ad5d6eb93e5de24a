"""A secret that a user writes anywhere is in no file that a run leaves."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from support.faults import Ended, command, fault, words_of

CANARY = "canary7"
# A reward that takes every option.
ODD_REWARD = """
import logging
from flowgrpo_rc.rewards.base import Reward, Scores

class Odd(Reward):
    def __init__(self, **options):
        self._options = options

    def __call__(self, samples, prompts):
        logging.getLogger("odd").warning("sent api_key=%s", self._options["key"])
        return Scores(values=[float(sample.mean()) for sample in samples])
"""
ODD = "reward.terms.odd"
# Options of the reward; SECRET is the place of a secret.
PLACES = {
    "key": "SECRET",
    "bearer": "SECRET",
    "password": "'SECRET horse SECRET'",
    "db_password": "SECRET",
    "clientSecret": "SECRET",
    "headers": "{X-Api-Key: SECRET, Authorization: 'Bearer SECRET'}",
    "nested": "{a: [{b: {auth_token: SECRET}}], c: 1}",
    "s3": "'https://h/a?X-Amz-Credential=SECRET&x=1&X-Amz-Signature=SECRET'",
    "aws": "'https://h/a?AWSAccessKeyId=SECRET&Signature=SECRET'",
    "azure": "'https://h/a?sv=1&sig=SECRET&se=2'",
    "google": "'https://h/a?key=SECRET&token=SECRET'",
    "user": "postgres://me:SECRET@host/db",
    "text": "'log in with password=SECRET there'",
    "hftoken": "SECRET",
}


@pytest.fixture
def told(small: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Words of a training with a secret in each place, and one in the environment."""
    Path("odd_reward.py").write_text(ODD_REWARD)
    monkeypatch.setenv("SOME_API_KEY", f"{CANARY}-environment")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    secrets = [
        f"{ODD}.{name}={text.replace('SECRET', CANARY + name)}" for name, text in PLACES.items()
    ]
    note = f"{ODD}.note=from {CANARY}-environment"
    others = ("trainer.logger=[console,tensorboard,wandb]", "actor.optim.lr_scheduler=constant")
    return words_of(small, f"{ODD}._target_=odd_reward.Odd", *secrets, note, *others)


def run(words: Sequence[str]) -> Ended:
    """Runs a command as its user does, so that the process has these words."""

    def said() -> None:
        sys.argv = ["flowgrpo-rc", *words]
        logging.getLogger().handlers.clear()  # those of the test runner

    return command(*words, harm=said)


def leaks(folder: Path) -> list[str]:
    """Returns the files that hold a canary, with some of what stands around it."""
    found = []
    for path in sorted(folder.rglob("*")):
        content = path.read_bytes() if path.is_file() else b""
        place = content.find(CANARY.encode())
        if place >= 0:
            found.append(
                f"{path.relative_to(folder)}: {content[max(place - 40, 0) : place + 40]!r}"
            )
    return found


@fault(
    "options of a reward, URLs, the command line, log messages and the environment hold secrets",
    "none is in a file of the run, of tensorboard, of wandb or of an export",
)
def test_secrets_are_in_no_file(told: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    ended = run(told).expect(0, "sent api_key=***")
    assert leaks(folder) == []
    assert CANARY not in ended.output
    options = yaml.safe_load((folder / "config.yaml").read_text())["reward"]["terms"]["odd"]
    assert options.keys() >= {"headers", "nested", "azure"}
    assert options["azure"] == "https://h/a?***"
    assert list(folder.rglob("*.wandb"))
    assert list(folder.rglob("events.out.tfevents.*"))
    run(["export", str(folder), "--out", str(folder / "export")]).expect(0)
    run(["report", str(folder)]).expect(0)
    assert leaks(folder) == []
    # An evaluation names the options to give again.
    run(["eval", str(folder), "--trust"]).expect(2, f"{ODD}.key")
    again = [word for word in told if word.startswith(ODD)]
    run(["eval", str(folder), "--trust", *again]).expect(0)
    # The same command is the same run.
    run(words_of(told[1:], "trainer.total_training_steps=4")).expect(0, "step 4/4")
    assert leaks(folder) == []
