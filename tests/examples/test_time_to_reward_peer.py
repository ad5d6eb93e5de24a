"""Checks what is put into another project's training script, and what that script leaves."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cells import PLAIN_JOB
from peft import LoraConfig, get_peft_model
from support.compositions import checked_config
from time_to_reward_peer import Finished, Iterations, Settings, change, limited, settings

from flowgrpo_rc.config.compose import compose_config
from flowgrpo_rc.config.tree import Config
from flowgrpo_rc.records.checkpoint import list_checkpoints, load_checkpoint


@pytest.fixture
def job(tmp_path: Path) -> Config:
    clip = "actor.diffusion_loss.clip_ratio=1e-3"  # the script takes a number
    given = (clip, "trainer.total_training_steps=3", "trainer.save_freq=2", "trainer.seed=7")
    return checked_config(compose_config([*PLAIN_JOB, *given, f"trainer.output_dir={tmp_path}"]))


def defaults() -> Settings:
    sections = {name: Settings() for name in ("pretrained", "sample", "train")}
    return Settings(seed=42, save_freq=20, **sections)


def test_the_script_gets_the_batch_and_the_sampler_of_the_job(job: Config, tmp_path: Path) -> None:
    found = settings(defaults(), job, tmp_path)
    sample, train = found.sample, found.train
    images = sample.train_batch_size * sample.num_batches_per_epoch
    assert images == job.data.train_batch_size * job.rollout.n
    assert train.batch_size == sample.train_batch_size == 2 * sample.num_image_per_prompt
    assert (sample.sde_window_size, sample.sde_window_range) == (3, (0, 5))
    assert (sample.sde_type, sample.noise_level, train.clip_range) == ("sde", 1.0, 1e-3)
    assert (found.seed, found.mixed_precision, train.learning_rate) == (7, "no", 1e-3)
    change(found, ["train.clip_range=1e-5"])
    assert train.clip_range == 1e-5


def test_its_evaluation_becomes_rows_and_snapshots(
    job: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time_to_reward_peer.SECONDS_TO_READ", 0.0)
    network = get_peft_model(
        torch.nn.Sequential(torch.nn.Linear(2, 2)), LoraConfig(r=1, target_modules=["0"])
    )
    trained = [p for p in network.parameters() if p.requires_grad]
    average = SimpleNamespace(ema_parameters=[torch.full_like(p, 5.0) for p in trained])
    evaluate = Iterations(tmp_path, job)
    pipeline = SimpleNamespace(transformer=network)
    for _ in range(3):
        evaluate(pipeline, average, trained)
    with pytest.raises(Finished):
        evaluate(pipeline, average, trained)
    rows = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [0, 1, 2, 3]
    second, third = map(load_checkpoint, list_checkpoints(tmp_path / "checkpoints"))
    assert (second.step, third.step) == (2, 3)
    assert third.tensors["lora"].keys() == {"0.lora_A.default.weight", "0.lora_B.default.weight"}
    assert all((tensor == 5.0).all() for tensor in third.tensors["lora"].values())


def test_tokenizers_keep_their_own_limit():
    class Tokenizer:
        model_max_length = 16

        def __call__(self, text: str, *, max_length: int, padding: str) -> tuple[str, int, str]:
            return text, max_length, padding

    for asked, allowed in ((77, 16), (8, 8)):
        found = limited(Tokenizer())("a", max_length=asked, padding="longest")
        assert found == ("a", allowed, "longest")
