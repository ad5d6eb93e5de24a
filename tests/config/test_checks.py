"""Wrong settings end with exit code 2 and one line, which names the key and what is allowed.

Those that a run refuses in the same way as a dry run are in `end_to_end/test_dry_run.py`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.compositions import config_of
from support.runs import Train

from flowgrpo_rc.config.check_inputs import check_inputs
from flowgrpo_rc.models import base

RC = "algorithm.rollout_correction"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("actor=2", ["actor=2", "a section of keys, such as actor.diffusion_loss"]),
        ("actor_rollout_ref.actor=2", ["actor=2", "a section of keys"]),
        ("rollout.algo=sde", ["rollout.algo='sde'", "a section of keys"]),
        ("reward.terms=3", ["reward.terms=3", "a section of keys"]),
        ("actor.optim.lr=inf", ["actor.optim.lr=inf"]),
        ("actor.train_n=0", ["actor.train_n=0", "at least 1"]),
        ("rollout.algo.sde_window_range=[3]", ["sde_window_range=[3]", "two step indices"]),
        ("rollout.algo.tail=heun", ["rollout.algo.tail", "euler, ab2"]),
        ("rollout.algo.tail_steps=0", ["rollout.algo.tail_steps=0", "at least 1"]),
        ("rollout.val_kwargs.batch_size=0", ["rollout.val_kwargs.batch_size=0"]),
        ("rollout.pipeline.condition_images=1", ["rollout.pipeline.condition_images=1"]),
        ("rollout.pipeline.condition_images=-1", ["condition_images=-1", "at least 0"]),
        ("rollout.pipeline.condition_pixels=99", ["condition_pixels=99 has no effect"]),
        (f"{RC}.rollout_rs=seq_mean_k1,token_k1", ["must be a list"]),
        (f'{RC}.rollout_rs_threshold="2.0_0.5"', ["rollout_rs_threshold"]),
        # Two settings that exclude each other.
        ("rollout.merge_lora=true rollout.quantization=int8", ["merge_lora", "int8"]),
        ("rollout.merge_lora=true model.quantization=int8", ["merge_lora", "model.quantization"]),
        ("rollout.quantization=int8 model.quantization=int8", ["has rounded already: drop one"]),
        ("model.quantization=int8 model.dtype=fp64 trainer.mixed_precision=no", ["dtype=fp64"]),
        ("model.quantization=fp8", ["model.quantization='fp8'", "int8, int4, nf4"]),
        ("rollout.algo.shared_prefix=true rollout.algo.window_sharing=sample", ["shared_prefix"]),
        ("rollout.algo.shared_prefix=true actor.replay=aligned", ["shared_prefix", "aligned"]),
        ("rollout.n=4 actor.train_n=2 actor.replay=aligned", ["actor.train_n=2", "aligned"]),
        ("actor.train_n=1 actor.ppo_micro_batch_size_per_gpu=4", ["2 samples", "actor.train_n=1"]),
        (
            "rollout.algo.tail=ab2 rollout.algo.sde_window_range=[1,4]",
            ["rollout.algo.tail=ab2 has no effect"],
        ),
        (
            "trainer.tf32=true rollout.name=vllm_omni rollout.dtype=fp32",
            ["trainer.tf32=true", "rollout.dtype=bf16"],
        ),
        ("rollout.dtype=fp64 trainer.mixed_precision=bf16", ["trainer.mixed_precision=no"]),
    ],
)
def test_wrong_settings(
    train: Train,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    settings: str,
    words: list[str],
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(base, "load_weights", fail)
    assert train(*settings.split()) == 2
    *again, error = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ")
    assert all("given" in line for line in again), again
    for word in words:
        assert word in error


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
        check_inputs(config_of(*settings))
    assert str(error.value).endswith("; 8 more of 10 prompts: line 3, line 4, ...")
    (tmp_path / f"{key}.jsonl").write_text(json.dumps({"prompt": key} | good))
    check_inputs(config_of(*settings))
