"""`flowgrpo_rc.train` and `Run`: the command line's path, from Python."""

from __future__ import annotations

import logging
import re
import sys
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import yaml
from support.runs import Trained, final_state

import flowgrpo_rc
from flowgrpo_rc import Prompt, Run
from flowgrpo_rc.api import Metrics, _settings
from flowgrpo_rc.cli import main
from flowgrpo_rc.config.compose import compose_config
from flowgrpo_rc.config.from_python import override_lines
from flowgrpo_rc.config.tree import stored_config
from flowgrpo_rc.data.prompts import read_prompts
from flowgrpo_rc.records import progress
from flowgrpo_rc.rewards.function import give
from flowgrpo_rc.rewards.manager import RewardError


def brightness(image: np.ndarray, prompt: Prompt) -> float:
    return float(image.mean()) / 255


def test_python_and_the_command_line_train_the_same(
    overrides: list[str], trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = trained()
    capsys.readouterr()
    run = flowgrpo_rc.train(overrides)
    # Nobody sees a bar here, so Python prints what the command line does.
    lines = re.compile(r"^(?:log-ratio: .*|step \d/2  \w+ \S+|held-out.*|LoRA)", re.MULTILINE)
    assert len(lines.findall(capsys.readouterr().out)) == 6
    assert final_state(run.folder) == final_state(whole)
    assert run == Run(tmp_path / "run")
    assert run.stopped is None
    assert run.before["reward"] == run.metrics[0]["val/reward"]
    assert run.after["reward"] == run.metrics[-1]["val/reward"]
    assert (run.lora / "pytorch_lora_weights.safetensors").is_file()
    run.report().unlink()
    assert run.report().is_file()
    with pytest.warns(UserWarning, match=r"nothing was trained: .* holds a finished run"):
        flowgrpo_rc.train(overrides)


@pytest.mark.slow
def test_a_bar_shows_a_run_that_somebody_watches(
    overrides: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("flowgrpo_rc.api.is_seen", lambda: True)
    shown = partial(progress.tqdm, disable=False)  # tests run without bars
    monkeypatch.setattr(progress, "tqdm", shown)
    flowgrpo_rc.train(overrides)
    bar = capsys.readouterr().out
    before, _, training = bar.partition("training: ")
    assert "loading: " in before
    assert "loading: " not in training
    assert re.search(r"training: 100%.* 2/2 \[\d\d:\d\d<.* reward=\S+, loss=\S+\]", bar)


def test_a_run_shows_its_numbers_and_pictures(
    overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {key: yaml.safe_load(value) for key, _, value in (o.partition("=") for o in overrides)}
    texts = ["<script>alert(1)", "a cat & co", "a dog", "a car", "a sea"]
    settings = given | {"data.val_files": texts, "trainer.max_time": 1e-3}
    with ThreadPoolExecutor(1) as pool:  # no signal reaches a thread, which may train all the same
        run = pool.submit(flowgrpo_rc.train, settings).result()
    shown = repr(run)
    assert shown.startswith(f"<Run {run.folder}: Held-out reward {run.before['reward']:.4f}, eval")
    assert "; Training steps: 1 of 2; " in shown
    assert shown.endswith(f"LoRA: {run.lora}; stopped early: trainer.max_time is over>")
    assert {name: len(images) for name, images in run.images.items()} == {"before": 5}
    assert run.images["before"][1].info["subject"] == texts[1]
    assert max(run.images["before"][1].size) == 128
    html = run._repr_html_()
    assert html.count("<img ") == 4
    assert "<script>" not in html
    assert "&lt;script&gt;alert(1)" in html
    assert f"LoRA: {run.lora}" in html
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert run.metrics._repr_html_() is None
    last = f"'step': 1, 'reward/mean': {run.metrics[-1]['reward/mean']}"
    assert repr(run.metrics).startswith(f"<2 rows of metrics, the last with {{{last}")
    assert len(repr(run.metrics)) < 400
    assert repr(Metrics()).startswith("<0 rows of metrics")
    with pytest.raises(ImportError, match="pip install pandas"):
        run.metrics.to_pandas()
    pandas = ModuleType("pandas")
    pandas.__spec__ = ModuleSpec("pandas", None)
    pandas.DataFrame = list  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pandas", pandas)
    assert run.metrics.to_pandas() == run.metrics


def test_the_other_commands_print_nothing(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, other = Run(trained()), trained("trainer.test_freq=1")
    capsys.readouterr()
    assert {name: len(images) for name, images in run.images.items()} == {"before": 8, "after": 8}
    found = flowgrpo_rc.evaluate(run)
    assert found.base["reward"] == pytest.approx(run.before["reward"])
    assert found.lora["reward"] == pytest.approx(run.after["reward"])
    page = flowgrpo_rc.compare(run, other, out=tmp_path / "both.html")
    assert page.read_text().lower().startswith("<!doctype html>")
    file = flowgrpo_rc.export(run, tmp_path / "lora")
    assert file.read_bytes() == (run.lora / file.name).read_bytes()
    assert capsys.readouterr().out == ""


@pytest.mark.slow
def test_a_plan_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    plan = flowgrpo_rc.plan({"data.train_batch_size": 8})
    assert capsys.readouterr().out == ""
    assert main(["plan", "data.train_batch_size=8"]) == 0
    assert capsys.readouterr().out.startswith(f"{plan!r}\n")


class Dataset:
    """Gives rows as datasets.Dataset does, which is no list."""

    def __init__(self, *prompts: object) -> None:
        self.rows = [{"prompt": prompt, "target": "3"} for prompt in prompts]

    def __iter__(self) -> Iterator[dict[str, object]]:
        return iter(self.rows)


def length(completions: list[str], **kwargs: object) -> list[float]:
    return [float(len(completion)) for completion in completions]


def test_prompts_and_a_list_of_rewards_may_be_of_the_session(tmp_path: Path) -> None:
    def ends(completion: str, target: str) -> bool:
        return completion.endswith(target)

    settings: dict[str, object] = {"trainer.total_training_steps": 1, "data.train_batch_size": 4}
    settings["data.allow_overlap"] = True
    settings |= {"actor.ppo_mini_batch_size": 4, "actor.ppo_micro_batch_size_per_gpu": 32}
    settings |= {"trainer.output_dir": tmp_path / "run", "trainer.device": "cpu"}
    texts = ["1+2=", "2+1=", "3+0=", "0+3="]
    given = {"data.train_files": Dataset(*texts), "data.val_files": Dataset(*texts).rows}
    own: dict[str, Any] = {"rewards": [length, ends], "config_name": "token_grpo"}
    run = flowgrpo_rc.train(settings | given, **own)
    assert {"length", "ends", "reward"} <= run.after.keys()
    stored = stored_config(run.folder / "config.yaml").data
    for file in (stored.train_files, stored.val_files):
        assert [prompt.text for prompt in read_prompts(file, require_target=True)] == texts
    for again in (partial(flowgrpo_rc.train, settings | given, **own), run.resume):
        with pytest.warns(UserWarning, match="nothing was trained"):  # it is the same run
            again(rewards=own["rewards"])
    plain = r"data\.val_files: its rows must be mappings of plain data"
    with pytest.raises(ValueError, match=plain):
        flowgrpo_rc.train(settings | {"data.val_files": Dataset(object())})
    for wrong in ([length, length], [lambda x, y: 0], length.__name__):
        with pytest.raises(ValueError, match=r'give \{"mine": function'):
            flowgrpo_rc.train(settings, rewards=wrong, config_name="token_grpo")


@pytest.fixture
def unrewarded(overrides: list[str]) -> list[str]:
    return [override for override in overrides if not override.startswith("reward.")]


@pytest.mark.slow
def test_functions_of_the_session_take_the_place_of_the_rewards(unrewarded: list[str]) -> None:
    calls: list[int] = []
    steps: list[int] = []

    def bright(image: np.ndarray, prompt: Prompt) -> float | None:
        calls.append(prompt.index)
        return brightness(image, prompt) if len(calls) != 9 else None

    run = flowgrpo_rc.train(
        [*unrewarded, "reward.terms.bright.weight=2.0", "reward.terms.jpeg=null"],
        rewards={"bright": bright},
        callbacks=[lambda step, _: steps.append(step)],
    )
    assert steps == [0, 1, 2]
    terms = stored_config(run.folder / "config.yaml").reward.terms
    assert terms == {"bright": {"_target_": "function", "path": "given:bright", "weight": 2.0}}
    first = run.metrics[1]
    assert first["reward/mean"] == pytest.approx(2 * first["reward/bright"])
    assert first["reward/failed_fraction"] == 1 / 8  # 8 held-out samples came before


@pytest.mark.slow
def test_a_callback_stops_and_resume_goes_on_to_the_same_bits(
    unrewarded: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The function of another session has to be given again."""
    bright = {"bright": lambda image, prompt: brightness(image, prompt)}
    weighed = [*unrewarded, "reward.terms.bright.weight=2"]
    elsewhere = [*weighed, f"trainer.output_dir={tmp_path / 'whole'}"]
    whole = flowgrpo_rc.train(elsewhere, rewards=bright, verbose=False)
    assert capsys.readouterr() == ("", "")
    stopped = flowgrpo_rc.train(weighed, rewards=bright, callbacks=[lambda step, _: step == 1])
    assert stopped.stopped == "a callback asked for it"
    assert len(stopped.metrics) == 2
    monkeypatch.setattr("flowgrpo_rc.rewards.function._given", {})
    for call in (stopped.resume, partial(flowgrpo_rc.evaluate, stopped)):
        with pytest.raises(ValueError, match=r"Run\.resume take rewards=\{'bright': the fun"):
            call()
        with pytest.raises(ValueError, match=r"^reward\.terms\.brigt is set \(did you mean"):
            call({"reward.terms.brigt.weight": 2}, rewards=bright)
    found = flowgrpo_rc.evaluate(stopped, rewards=bright)
    assert found.base["reward"] == pytest.approx(stopped.before["reward"])
    assert found.base["reward"] == pytest.approx(2 * found.base["bright"])
    run = Run(stopped.folder).resume(rewards=bright, verbose=True)
    assert "step 2/2" in capsys.readouterr().out
    assert final_state(run.folder) == final_state(whole.folder)


def test_a_reward_that_raises_ends_in_one_error_with_its_line(
    unrewarded: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # as in a notebook

    def broken(image: np.ndarray, prompt: Prompt) -> float:
        return brightness(image, prompt) / 0

    place = re.escape(f"broken ({__file__}:{broken.__code__.co_firstlineno + 1})")
    with pytest.raises(RewardError, match=rf"ZeroDivisionError: .*, in .*{place}$") as got:
        flowgrpo_rc.train(unrewarded, rewards={"x": broken})
    frames = map(traceback.extract_tb, (got.tb, got.value.__cause__.__traceback__))
    assert [frame[-1].name for frame in frames] == ["called", "broken"]
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_an_override_refines_a_reward_and_a_file_does_not() -> None:
    found = _settings(["reward.terms.ocr.threads=2"], None, None, {"ocr": {"weight": 0.5}})
    assert found.reward.terms == {"ocr": {"weight": 0.5, "threads": 2}}


def test_the_command_line_says_where_a_function_of_a_session_was(
    overrides: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = give("gone", lambda image, prompt: 0.0)
    terms = ("reward.terms.jpeg=null", "reward.terms.x._target_=function")
    assert main(["train", *overrides, *terms, f"reward.terms.x.path={path}x", "--dry-run"]) == 2
    assert "a function of the Python session that started the run" in capsys.readouterr().err


TEXTS = ["plain", "a word", "it's", 'say "hi"', "a,b", "0.5_2", "0.5", "null", "True", "a=b", ""]
TEXTS += ["back\\slash", "ends\\", "both\\' of them", "{a:b}", "[x]", "\u00fcber"]


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_stays_what_it_is(text: str) -> None:
    composed = compose_config(override_lines({"trainer.experiment_name": text}))
    assert composed.trainer.experiment_name == text


def test_values_of_every_kind_reach_the_settings(tmp_path: Path) -> None:
    lines = override_lines(
        {
            "rollout.algo.sde_window_range": [0, 4],
            "rollout.algo.sde_window_size": None,
            "actor.optim.lr": 1e-5,
            "actor.use_kl_loss": True,
            "data.train_files": tmp_path / "my prompts.txt",
            "reward.terms.ocr": {"weight": 0.5},
            "algorithm.rollout_correction": "bypass_ppo_clip",
        }
    )
    composed = compose_config(lines)
    assert composed.rollout.algo.sde_window_range == [0, 4]
    assert composed.rollout.algo.sde_window_size is None
    assert composed.actor.optim.lr == 1e-5
    assert composed.actor.use_kl_loss is True
    assert composed.data.train_files == str(tmp_path / "my prompts.txt")
    assert composed.reward.terms.ocr.weight == 0.5
