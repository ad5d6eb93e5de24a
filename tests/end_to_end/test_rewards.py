"""Runs whose rewards fail, come from a hostile server, have different scales, or score latents."""

from __future__ import annotations

import json
import logging
import sys
import textwrap
from pathlib import Path

import pytest
from diffusers import AutoencoderKL
from support.hostile_servers import HOSTILE, TOKEN, jpeg
from support.reward_servers import answering, scripted
from support.runs import Train, read_rows

from flowgrpo_rc.cli import main

BROKEN = """
import numpy as np
from flowgrpo_rc.rewards.base import Reward, Scores

class Raises(Reward):
    def __call__(self, images, prompts):
        raise RuntimeError("the scorer is down")

class ReturnsNone(Reward):
    def __call__(self, images, prompts):
        return None

class NotANumber(Reward):
    def __call__(self, images, prompts):
        return Scores(values=[float("nan")] * len(prompts))

class TooShort(Reward):
    def __call__(self, images, prompts):
        return Scores(values=[1.0])

class OneInFour(Reward):
    def __call__(self, images, prompts):
        numbers = [float(prompt.index) for prompt in prompts]
        return Scores(values=[n if n % 4 else float("nan") for n in numbers])
"""


@pytest.fixture
def broken_rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "broken_rewards.py").write_text(textwrap.dedent(BROKEN))
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("broken_rewards", None)
    return "broken_rewards"


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("Raises", "the scorer is down"),
        ("ReturnsNone", "NoneType"),
        ("NotANumber", "nan"),
        ("TooShort", "1 scores"),
    ],
)
def test_a_reward_that_fails_ends_the_run_with_its_reason(
    train: Train, capsys: pytest.CaptureFixture, broken_rewards: str, name: str, word: str
) -> None:
    chosen = ("reward.terms.jpeg=null", f"reward.terms.mine._target_={broken_rewards}.{name}")
    assert train(*chosen) == 1
    error = capsys.readouterr().err
    assert "reward.max_failed_fraction" in error
    assert "'mine'" in error
    assert word in error


def test_single_failures_leave_the_baseline_and_are_counted(
    train: Train, broken_rewards: str, tmp_path: Path
) -> None:
    from support.runs import read_rows

    chosen = ("reward.terms.jpeg=null", f"reward.terms.mine._target_={broken_rewards}.OneInFour")
    assert train(*chosen) == 0
    rows = read_rows(tmp_path / "run")
    assert any(row.get("reward/failed_fraction", 0) > 0 for row in rows)
    # A score of 0 for prompt 0 would lower the mean.
    assert all(row["reward/mean"] >= 1 for row in rows[1:])


def test_a_run_goes_on_beside_a_hostile_server_and_writes_no_token(
    train, tmp_path, caplog, capfd, monkeypatch
):
    """The reward comes from one server. Another one, of weight 0, fails and repeats the token."""
    monkeypatch.setenv("REWARD_TOKEN", TOKEN)
    caplog.set_level(logging.DEBUG)
    with scripted(answering(jpeg)) as good, scripted(HOSTILE["echoes the token"]) as bad:
        remote = "_target_: remote, token_env: REWARD_TOKEN, deadline_s: 60"
        code = train(
            f"+reward.terms.good={{{remote}, url: '{good.url}', weight: 0.5}}",
            f"+reward.terms.bad={{{remote}, url: '{bad.url}', weight: 0.0}}",
            "reward.max_failed_fraction=1.0",
            "trainer.logger=[console,tensorboard]",
        )
        assert code == 0
        assert train(f"+reward.terms.good={{{remote}, url: '{good.url}'}}", "--cfg", "job") == 0
        assert main(["report", str(tmp_path / "run")]) == 0
        assert good.received
        assert bad.received
    run = tmp_path / "run"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["reward/good"] == pytest.approx(rows[-1]["reward/jpeg"])
    assert "reward/bad" not in rows[-1]  # no sample has one
    assert (run / "report.html").is_file()
    written = b"".join(path.read_bytes() for path in run.rglob("*") if path.is_file())
    shown = capfd.readouterr()
    assert b"REWARD_TOKEN" in written
    assert "REWARD_TOKEN" in shown.out
    assert TOKEN.encode() not in written
    assert TOKEN not in caplog.text + shown.out + shown.err


HERE = __name__
GDPO = "algorithm.adv_estimator=gdpo"


def left(image, prompt):
    return float(image[:, :4].mean())


def mean(sample, prompt):
    return float(sample.mean())


def test_two_rewards_of_any_scale_train_and_saved_ones_must_be_there(train, tmp_path, capsys):
    two = (
        GDPO,
        "reward.terms.jpeg.weight=1e3",
        f"+reward.terms.left={{_target_: function, path: '{HERE}:left'}}",
    )
    assert train(*two, "trainer.save_rollouts=true") == 0
    rows = read_rows(tmp_path / "run")
    assert {"reward/jpeg", "reward/left"} <= rows[1].keys()
    assert rows[1]["advantages/std"] == pytest.approx(1, abs=1e-3)
    assert rows[1]["advantages/mean"] == pytest.approx(0, abs=1e-9)
    page = (tmp_path / "run" / "report.html").read_text()
    assert all(f"<b>{name}</b>" in page for name in ("reward/jpeg", "reward/left"))
    replay = f"data.replay_dir={tmp_path / 'run'}"
    assert train(*two, replay, f"trainer.output_dir={tmp_path / 'again'}") == 0
    again = read_rows(tmp_path / "again")
    assert [row.get("advantages/max") for row in again] == [
        row.get("advantages/max") for row in rows
    ]
    other = f"+reward.terms.other={{_target_: function, path: '{HERE}:left'}}"
    assert train(GDPO, replay, other, f"trainer.output_dir={tmp_path / 'third'}") == 2
    assert (
        "has no reward 'other', and algorithm.adv_estimator=gdpo needs each"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("setting", ["norm_adv_by_std_in_grpo=true", "global_std=false"])
def test_what_has_no_effect_is_refused(setting, train, capsys):
    assert train(GDPO, f"algorithm.{setting}") == 2
    assert "has no effect with algorithm.adv_estimator=gdpo" in capsys.readouterr().err


@pytest.mark.parametrize(("kind", "decoded"), [("latent", 2), ("image", 6)])
def test_a_run_decodes_only_what_is_looked_at(kind, decoded, train, tmp_path, monkeypatch):
    """Two evaluations show one batch each.

    For an image reward, the two chunks of both steps are decoded as well.
    """
    calls = []
    decode = AutoencoderKL.decode

    def counted(vae, latents, *args, **kwargs):
        calls.append(len(latents))
        return decode(vae, latents, *args, **kwargs)

    monkeypatch.setattr(AutoencoderKL, "decode", counted)
    term = f"{{_target_: function, path: '{HERE}:mean', kind: {kind}}}"
    code = train(
        "reward.terms.jpeg=null",
        f"+reward.terms.x={term}",
        "rollout.micro_batch_size_per_gpu=4",
        "trainer.test_freq=0",
    )
    assert code == 0
    assert len(calls) == decoded
    rows = read_rows(tmp_path / "run")
    assert all(row["reward/x"] is not None for row in rows if "reward/x" in row)
    assert (abs(rows[-1]["val/x"]) < 10) == (kind == "latent")
