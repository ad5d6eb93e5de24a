"""Runs whose rewards fail, come from a hostile server, have different scales, or score latents."""

from __future__ import annotations

import logging

import pytest
from diffusers import AutoencoderKL
from support.hostile_servers import HOSTILE, TOKEN, jpeg
from support.reward_servers import answering, scripted
from support.runs import read_rows

from flowgrpo_rc.cli import main

HERE = __name__
GDPO = "algorithm.adv_estimator=gdpo"


def left(image, prompt):
    return float(image[:, :4].mean())


def mean(sample, prompt):
    return float(sample.mean())


def function(name: str, kind: str = "image") -> str:
    return f"+reward.terms.{name}={{_target_: function, path: '{HERE}:{name}', kind: {kind}}}"


def test_a_run_goes_on_beside_a_hostile_server_and_writes_no_token(
    train, tmp_path, caplog, capfd, monkeypatch
):
    """The reward comes from one server. Another one, of weight 0, fails and repeats the token."""
    monkeypatch.setenv("REWARD_TOKEN", TOKEN)
    caplog.set_level(logging.DEBUG)
    with scripted(answering(jpeg)) as good, scripted(HOSTILE["echoes the token"]) as bad:
        remote = "_target_: remote, token_env: REWARD_TOKEN, deadline_s: 60"
        terms = (
            f"+reward.terms.good={{{remote}, url: '{good.url}', weight: 0.5}}",
            f"+reward.terms.bad={{{remote}, url: '{bad.url}', weight: 0.0}}",
        )
        logger = "trainer.logger=[console,tensorboard]"
        assert train(*terms, "reward.max_failed_fraction=1.0", logger) == 0
        assert train(f"+reward.terms.good={{{remote}, url: '{good.url}'}}", "--cfg", "job") == 0
        assert main(["report", str(tmp_path / "run")]) == 0
        assert good.received
        assert bad.received
    run = tmp_path / "run"
    last = read_rows(run)[-1]
    assert last["reward/good"] == pytest.approx(last["reward/jpeg"])
    assert "reward/bad" not in last  # no sample has one
    assert (run / "report.html").is_file()
    written = b"".join(path.read_bytes() for path in run.rglob("*") if path.is_file())
    shown = capfd.readouterr()
    assert b"REWARD_TOKEN" in written
    assert "REWARD_TOKEN" in shown.out
    assert TOKEN.encode() not in written
    assert TOKEN not in caplog.text + shown.out + shown.err


@pytest.mark.slow
def test_two_rewards_of_any_scale_train_and_saved_ones_must_be_there(train, tmp_path, capsys):
    two = (GDPO, "reward.terms.jpeg.weight=1e3", function("left"))
    assert train(*two, "trainer.save_rollouts=true") == 0
    rows = read_rows(tmp_path / "run")
    assert {"reward/jpeg", "reward/left"} <= rows[1].keys()
    assert rows[1]["advantages/std"] == pytest.approx(1, abs=1e-3)
    assert rows[1]["advantages/mean"] == pytest.approx(0, abs=1e-9)
    page = (tmp_path / "run" / "report.html").read_text()
    assert all(f"<b>{name}</b>" in page for name in ("reward/jpeg", "reward/left"))
    replay = f"data.replay_dir={tmp_path / 'run'}"
    assert train(*two, replay, f"trainer.output_dir={tmp_path / 'again'}") == 0
    again, largest = read_rows(tmp_path / "again"), "advantages/max"
    assert [row.get(largest) for row in again] == [row.get(largest) for row in rows]
    assert train(GDPO, replay, function("mean"), f"trainer.output_dir={tmp_path / 'third'}") == 2
    assert "has no reward 'mean', and algorithm.adv_est" in capsys.readouterr().err


@pytest.mark.slow
def test_latents_are_decoded_only_to_be_looked_at(train, tmp_path, monkeypatch):
    """Two evaluations show one batch each."""
    calls = []
    decode = AutoencoderKL.decode

    def counted(vae, latents, *args, **kwargs):
        if not latents.is_meta:  # else it is the check before anything is loaded
            calls.append(len(latents))
        return decode(vae, latents, *args, **kwargs)

    monkeypatch.setattr(AutoencoderKL, "decode", counted)
    further = ("rollout.micro_batch_size_per_gpu=4", "trainer.test_freq=0")
    assert train("reward.terms.jpeg=null", function("mean", "latent"), *further) == 0
    assert len(calls) == 2
    rows = read_rows(tmp_path / "run")
    assert all(row["reward/mean"] is not None for row in rows[1:])
    assert abs(rows[-1]["val/mean"]) < 10  # pixels have a mean of about 128
