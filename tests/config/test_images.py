"""Condition images and the model: what does not go together is found before weights are loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.compositions import config_of, resolved
from support.tiny_models import png

from flowgrpo_rc.config.tree import Config
from flowgrpo_rc.models.qwen_image_edit import QwenImageEdit
from flowgrpo_rc.rollout.check_model import check_model
from flowgrpo_rc.spec.check_engine import check_engine
from flowgrpo_rc.spec.check_inputs import check_overlap, prompts_of
from flowgrpo_rc.spec.checks import check_run


@pytest.fixture
def edits(saved: Callable[[str], Path], tmp_path: Path) -> Config:
    """A run of the random klein with one image, whose second prompt has one that is too narrow."""
    rows = []
    for name, size in (("a", (64, 64)), ("b", (64, 60))):
        (tmp_path / f"{name}.png").write_bytes(png(np.zeros((*size, 3), np.uint8)))
        rows.append(json.dumps({"prompt": '"X"', "image": f"{name}.png"}))
    (tmp_path / "train.jsonl").write_text("\n".join(rows))
    (tmp_path / "val.jsonl").write_text(rows[0])
    return config_of(
        f"model.path={saved('Flux2KleinPipeline')}",
        f"data.train_files={tmp_path / 'train.jsonl'}",
        f"data.val_files={tmp_path / 'val.jsonl'}",
        "data.train_batch_size=1",
        "actor.ppo_mini_batch_size=1",
        "rollout.dtype=fp32",
        "rollout.pipeline.condition_images=1",
        "trainer.num_processes=1",
        f"trainer.output_dir={tmp_path / 'run'}",
    )


def test_a_size_that_the_model_does_not_take_is_said_with_its_line(edits: Config) -> None:
    with pytest.raises(ValueError, match=r"train\.jsonl, line 2: .*b\.png: Image too small: 60"):
        check_run(resolved(edits), trains=False)


def test_the_same_words_about_another_picture_are_another_prompt(
    edits: Config, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="1 of 1 held-out prompts are training prompts"):
        check_overlap(edits, prompts_of(resolved(edits)))
    (tmp_path / "c.png").write_bytes(png(np.ones((64, 64, 3), np.uint8)))
    (tmp_path / "val.jsonl").write_text('{"prompt": "\\"X\\"", "image": "c.png"}')
    check_overlap(edits, prompts_of(resolved(edits)))


def test_a_distilled_checkpoint_takes_no_guidance(edits: Config) -> None:
    index = Path(edits.model.path) / "model_index.json"
    folder = Path(edits.data.val_files).parent / "distilled"
    folder.mkdir()
    for part in index.parent.iterdir():
        (folder / part.name).symlink_to(part)
    (folder / index.name).unlink()
    settings = json.loads(index.read_text()) | {"is_distilled": True}
    (folder / index.name).write_text(json.dumps(settings))
    edits.model.path = str(folder)
    edits.rollout.pipeline.guidance_scale = 2.0
    with pytest.raises(ValueError, match=r"rollout\.pipeline\.guidance_scale=2\.0 has no effect"):
        check_run(resolved(edits), trains=False)


def test_an_engine_that_encodes_texts_alone_is_refused(edits: Config) -> None:
    edits.rollout.name = "vllm_omni_engine"
    with pytest.raises(ValueError, match=r"vllm_omni_engine samples from texts alone"):
        check_engine(resolved(edits))


def test_an_editing_model_asks_for_images_and_for_its_package(
    edits: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    edits.rollout.pipeline.true_cfg_scale = 1.0
    check_model(QwenImageEdit, edits.rollout)
    edits.rollout.pipeline.condition_images = 0
    with pytest.raises(ValueError, match="condition_images=0: QwenImageEditPlusPipeline edits"):
        check_model(QwenImageEdit, edits.rollout)
    edits.rollout.pipeline.condition_images = 1
    monkeypatch.setattr("flowgrpo_rc.models.flux2_klein.Flux2Klein.packages", ("no_such_package",))
    with pytest.raises(ValueError, match=r"needs no_such_package: pip install .*torchvision"):
        check_run(resolved(edits), trains=False)
