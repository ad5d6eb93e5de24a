"""The model card has the metadata that the Hub reads and the numbers of the run, and no secret."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub import ModelCard
from PIL import Image
from support.report_pages import write_rows

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.config.tree import Config
from flowgrpo_rc.exports.model_card import LoraExport, write_model_card
from flowgrpo_rc.records.samples import save_grid, save_texts

ROWS = [
    {"step": 0, "val/reward": 0.25, "val/ocr/exact": 0.125},
    {"step": 1, "reward/mean": 0.3, "rollout_corr/logprob_abs_diff_mean": 1e-4},
    {"step": 2, "reward/mean": 0.4, "rollout_corr/logprob_abs_diff_mean": 3e-4}
    | {"val/reward": 0.5, "val/ocr/exact": 0.5},
    {"step": 3, "reward/mean": 0.4, "rollout_corr/logprob_abs_diff_mean": None},
]


def card(
    tmp_path: Path, config: Config, rows: list[Any] = ROWS, *, step: int = 2, raw: bool = False
) -> ModelCard:
    write_rows(tmp_path, rows)
    lora = LoraExport(step=step, tensors={}, raw=raw)
    return ModelCard.load(write_model_card(tmp_path, tmp_path, config, lora))


@pytest.fixture
def config() -> Config:
    config = Config()
    config.model.path = "someone/some-model"
    config.algorithm.rollout_correction.rollout_is = "token"
    return config


@pytest.mark.parametrize(("kind", "frames", "wanted"), [
    ("diffusion", None, ("diffusers", "text-to-image")),
    ("diffusion", 17, ("diffusers", "text-to-video")),
    ("causal_lm", None, ("peft", "text-generation")),
])  # fmt: skip
def test_metadata_is_what_the_hub_reads(
    tmp_path: Path, config: Config, kind: str, frames: int | None, wanted: tuple[str, str]
) -> None:
    config.model.kind = kind
    config.rollout.pipeline.num_frames = frames
    written = card(tmp_path, config)
    metadata = written.data.to_dict()
    assert metadata["base_model"] == "someone/some-model"
    assert metadata["base_model_relation"] == "adapter"
    assert "license" not in metadata
    assert {"lora", "flowgrpo-rc"} <= set(metadata["tags"])
    assert (metadata["library_name"], metadata["pipeline_tag"]) == wanted
    assert ("num_frames=17" in written.text) == (frames is not None)
    assert ("PeftModel.from_pretrained" in written.text) == (kind == "causal_lm")


@pytest.mark.parametrize("there", [True, False])  # a run's folder may have come without it
def test_a_local_model_is_named_without_its_path(
    tmp_path: Path, config: Config, there: bool
) -> None:
    model = tmp_path / "private" / "my-model"
    if there:
        model.mkdir(parents=True)
    config.model.path = str(model)
    text = card(tmp_path, config).content
    assert "base_model" not in text
    assert "a local checkpoint, `my-model`" in text
    assert str(tmp_path) not in text


def test_the_card_tells_what_was_decided_and_measured(tmp_path: Path, config: Config) -> None:
    (tmp_path / "health.jsonl").write_text('{"step": 2, "message": "kl is 0.2"}\n')
    facts = {"Model": "m", "Mode": "decoupled", "Loss and clip": "flow_grpo, clip 0.001"}
    (tmp_path / "decided.json").write_text(json.dumps(facts))
    text = card(tmp_path, config).text
    assert "| score | before | after step 2 |" in text
    assert "| reward | 0.2500 | 0.5000 |" in text
    assert "| ocr/exact | 0.1250 | 0.5000 |" in text
    assert "| Mismatch, mean of abs. log-prob difference | 0.0002 | 0.0003 |" in text
    assert "| mode | decoupled |\n| loss and clip | flow_grpo, clip 0.001 |" in text
    assert "`rollout_is=token`" in text
    assert "- step 2: kl is 0.2" in text
    assert "Rejected" not in text
    assert "40 ODE steps, 512 x 512 pixels" in text
    config.rollout.val_kwargs.width = 768
    text = card(tmp_path, config).text
    assert "40 ODE steps, 768 x 512 pixels" in text
    assert "width=768" in text


def test_weights_that_were_not_scored_say_so(tmp_path: Path, config: Config) -> None:
    assert "those of step 3, which was not evaluated" in card(tmp_path, config, step=3).text
    assert "not evaluated" not in card(tmp_path, config, step=2).text
    assert "this file holds the last ones" in card(tmp_path, config, raw=True).text
    once = card(tmp_path, config, ROWS[:2], step=1).text
    assert "| score | step 0 |" in once
    assert "The run was not evaluated." in card(tmp_path, config, ROWS[1:2]).text


def test_no_secret_and_no_host_is_in_it(tmp_path: Path, config: Config) -> None:
    config.reward.terms = {
        "remote": {"weight": 0.5, "url": "http://me:hunter2@host7/score", "api_key": "hunter3"}
    }
    config.trainer.experiment_name = "run token=hunter4"
    text = card(tmp_path, config).content
    assert "| rewards, weight | remote 0.5 |" in text
    assert not re.search("hunter|host7", text)


def test_the_card_shows_samples_of_the_scored_step(tmp_path: Path, config: Config) -> None:
    """Pictures with their prompts, or texts, as the Hub's `widget`; none of an older step."""
    assert "widget" not in card(tmp_path, config).data.to_dict()
    images = np.zeros((6, 8, 8, 3), np.uint8)
    prompts = [f'a sign: "{i}"' for i in range(6)]
    stem = tmp_path / "samples" / "step_000002"
    save_grid(stem.with_suffix(".png"), images, ["sign 0.5"] * 6, prompts)
    written = card(tmp_path, config)
    urls = [f"images/{i}.png" for i in range(4)]
    widget = [{"text": prompts[i], "output": {"url": urls[i]}} for i in range(4)]
    assert written.data.to_dict()["widget"] == widget
    assert re.findall(r"!\[sample \d\]\((.*?)\)", written.text) == urls
    for url in urls:
        with Image.open(tmp_path / url) as picture:
            assert picture.size == (128, 128)
    assert "widget" not in card(tmp_path, config, step=1).data.to_dict()
    stem.with_suffix(".png").unlink()
    prompt = Prompt(index=0, text="1+1")
    save_texts(stem.with_suffix(".jsonl"), ["2"], [prompt], [1.0])
    assert card(tmp_path, config).data.to_dict()["widget"] == [
        {"text": "1+1", "output": {"text": "2"}}
    ]
