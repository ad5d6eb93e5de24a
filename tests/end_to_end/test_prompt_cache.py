"""Runs whose prompts are encoded once (`model.prompt_cache`) train as those that keep nothing."""

from __future__ import annotations

import shutil
from pathlib import Path
from unittest.mock import patch

import pytest
from safetensors.torch import load_file, save_file
from support.runs import Trained, final_state, small_run

from flowgrpo_rc.cli import main
from flowgrpo_rc.models.base import FlowModel

# Three epochs of two batches.
LONGER = ("trainer.total_training_steps=6", "rollout.pipeline.guidance_scale=2.0")


@pytest.mark.slow
def test_kept_prompts_change_no_bit_and_other_encoders_encode_anew(
    trained: Trained, tmp_path: Path, checkpoint: Path, prompt_file: Path
) -> None:
    expected = final_state(trained(*LONGER))
    kept = f"model.prompt_cache={tmp_path / 'kept'}"
    assert final_state(trained(*LONGER, "model.prompt_cache=memory")) == expected
    assert final_state(trained(*LONGER, kept)) == expected
    settings = small_run(checkpoint, prompt_file, tmp_path / "warm")
    with patch.object(FlowModel, "encode", side_effect=AssertionError("encoded again")):
        assert main(["train", *settings, *LONGER, kept]) == 0
    assert final_state(tmp_path / "warm") == expected
    # Settings of an encoding have a folder of their own; a transformer is none of them.
    changed = shutil.copytree(checkpoint, tmp_path / "changed")
    for part, folders in (("transformer", 1), ("text_encoder_2", 2)):
        (weights,) = (changed / part).glob("*.safetensors")
        tensors = {name: tensor + 1e-3 for name, tensor in load_file(weights).items()}
        save_file(tensors, weights, metadata={"format": "pt"})
        assert main(["train", *small_run(changed, prompt_file, tmp_path / part), kept]) == 0
        assert len(list((tmp_path / "kept").iterdir())) == folders
