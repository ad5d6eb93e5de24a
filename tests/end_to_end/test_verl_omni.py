"""Commands of verl-omni train here."""

from __future__ import annotations

from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet
from support.runs import WORDS, Train, read_rows

from flowgrpo_rc.cli import main


def test_a_command_with_verl_omni_s_words_trains(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Ignored keys are stored with the run."""
    other = ["actor_rollout_ref.actor.optim.lr=1e-3", "trainer.nnodes=1", "data.shuffle=False"]
    assert train(*other) == 2
    assert "data.shuffle=False (prompts are always shuffled)" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert train(*other, "compat.ignore=[data.shuffle]") == 0
    stored = (tmp_path / "run" / "config.yaml").read_text()
    assert "ignore:\n  - data.shuffle" in stored


def test_a_whole_command_trains_on_its_own_files(checkpoint: Path, tmp_path: Path) -> None:
    """Only the reward and the device are in this project's words; model, parquet files, sizes
    and folder are not.
    """
    for split in ("train", "test"):
        rows = [
            {
                "data_source": "flow_grpo/ocr",
                "prompt": [
                    {"role": "system", "content": "Draw."},
                    {"role": "user", "content": f'a sign "{word}"'},
                ],
                "negative_prompt": [{"role": "user", "content": " "}],
                "reward_model": {"style": "model", "ground_truth": word},
                "extra_info": {"split": split, "index": index},
            }
            for index, word in enumerate(WORDS)
        ]
        parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / f"{split}.parquet")
    command = [
        f"data.train_files={tmp_path}/train.parquet",
        f"data.val_files={tmp_path}/test.parquet",
        "data.train_batch_size=4",
        "data.val_max_samples=4",
        "data.max_prompt_length=64",
        "actor_rollout_ref.model.algorithm=flow_grpo",
        f"actor_rollout_ref.model.path={checkpoint}",
        "actor_rollout_ref.model.lora_rank=4",
        "actor_rollout_ref.model.lora_alpha=8",
        "actor_rollout_ref.model.target_modules=['to_q','to_k','to_v']",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
        "actor_rollout_ref.actor.fsdp_config.model_dtype=float32",
        "actor_rollout_ref.actor.strategy=fsdp2",
        "actor_rollout_ref.rollout.name=diffusers_engine",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.rollout.pipeline.height=32",
        "actor_rollout_ref.rollout.pipeline.width=32",
        "actor_rollout_ref.rollout.pipeline.num_inference_steps=4",
        "actor_rollout_ref.rollout.pipeline.guidance_scale=2.0",
        "actor_rollout_ref.rollout.pipeline.max_sequence_length=16",
        "actor_rollout_ref.rollout.algo.sde_type=cps",
        "actor_rollout_ref.rollout.algo.noise_level=0.8",
        "actor_rollout_ref.rollout.algo.sde_window_size=2",
        "actor_rollout_ref.rollout.algo.sde_window_range=[0,3]",
        "actor_rollout_ref.rollout.val_kwargs.pipeline.num_inference_steps=2",
        "trainer.logger=[console]",
        "trainer.n_gpus_per_node=1",
        f"trainer.default_local_dir={tmp_path}/run",
        "trainer.save_freq=-1",
        "trainer.total_training_steps=2",
    ]
    assert (
        main(
            [
                "train",
                *command,
                "reward.terms.ocr=null",
                "reward.terms.jpeg.weight=1",
                "trainer.device=cpu",
            ]
        )
        == 0
    )
    rows = read_rows(tmp_path / "run")
    assert len(rows) == 3
    assert (tmp_path / "run" / "lora" / "pytorch_lora_weights.safetensors").is_file()
    assert all(row["actor/grad_norm"] > 0 for row in rows[1:])
