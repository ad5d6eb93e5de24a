"""Commands of verl-omni train here."""

from __future__ import annotations

from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet
from support.marks import slow
from support.reward_servers import answering, scripted
from support.runs import DEVICE, WORDS, read_rows
from support.verl_omni_commands import NFT, QWEN_IMAGE, SD35

from flowgrpo_rc.cli import main


def parquet_files(folder: Path) -> None:
    """Writes train.parquet and test.parquet as verl-omni's data scripts do."""
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
        parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"{split}.parquet")


@pytest.mark.parametrize(
    "command", [SD35, slow(QWEN_IMAGE), slow(NFT)], ids=["sd35", "qwen_image", "nft"]
)
def test_a_published_command_trains_with_the_reward_that_it_names(
    checkpoint: Path, tmp_path: Path, command: list[str]
) -> None:
    """Trains a published command on a tiny model, with the server of the test as its reward."""
    parquet_files(tmp_path)
    sizes = [
        f"data.train_files={tmp_path}/train.parquet",
        f"data.val_files={tmp_path}/test.parquet",
        "data.allow_overlap=true",
        "data.train_batch_size=2",
        f"model.path={checkpoint}",
        "model.target_modules=[to_q,to_k]",
        "model.lora_rank=2",
        "actor.ppo_mini_batch_size=2",
        "actor.ppo_micro_batch_size_per_gpu=2",
        "rollout.name=diffusers",
        "rollout.n=2",
        "rollout.pipeline.height=32",
        "rollout.pipeline.width=32",
        "rollout.pipeline.num_inference_steps=6",
        "rollout.pipeline.max_sequence_length=16",
        "rollout.pipeline.true_cfg_scale=1",
        "trainer.total_training_steps=1",
        "trainer.test_freq=-1",
        "trainer.logger=console",
        f"trainer.output_dir={tmp_path}/run",
        f"trainer.device={DEVICE}",
    ]
    answer = {"choices": [{"message": {"role": "assistant", "content": "AB7X\nHELP"}}]}
    with scripted(answering(lambda received: answer)) as server:
        url = f"reward.terms.vlm_ocr.url={server.url}/v1"
        assert main(["train", *command, *sizes, url]) == 0
    model = next(line for line in command if "reward_model.model_path" in line).partition("=")[2]
    assert {each.body["model"] for each in server.received if each.body} == {model}
    (row,) = read_rows(tmp_path / "run")  # the command has val_before_train=False
    assert row["step"] == 1
    assert row["reward/mean"] == row["reward/vlm_ocr"]
    assert (tmp_path / "run" / "lora" / "pytorch_lora_weights.safetensors").is_file()
