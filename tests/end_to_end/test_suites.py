"""Suites on whole runs: a gamed reward is told of, a run goes on, `evaluate --suite`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from support.runs import DEVICE, Train, read_rows, stopped_and_whole

import flowgrpo_rc
from flowgrpo_rc.cli import main
from flowgrpo_rc.config.tree import stored_config
from flowgrpo_rc.exports.model_card import LoraExport, write_model_card

EXAMPLES = Path(__file__).parents[2] / "examples"
# The reward likes saturated colours, whatever is drawn; the suite reads the words.
GAMED = (
    "rollout.dtype=fp32",
    "rollout.n=8",
    "actor.train_n=null",
    "rollout.val_kwargs.n=2",
    "data.train_files=four.txt",
    "data.train_batch_size=4",
    "actor.ppo_mini_batch_size=1",
    "actor.ppo_micro_batch_size_per_gpu=8",
    "actor.optim.lr=5e-3",
    "actor.optim.lr_scheduler=constant",
    "reward.terms.ocr=null",
    "reward.terms.saturation._target_=function",
    "reward.terms.saturation.path=saturation:saturation",
    f"trainer.device={DEVICE}",
    "trainer.test_freq=4",
    "trainer.val_before_train=false",
    "trainer.total_training_steps=8",
    "trainer.suites=[few_words.yaml]",
)


@pytest.fixture(scope="module")
def gamed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of eight steps on the bundled model, in a folder with what it needs."""
    folder = tmp_path_factory.mktemp("gamed")
    shutil.copy(EXAMPLES / "saturation.py", folder)
    # The same words in every step: the reward rises, or it does not.
    (folder / "four.txt").write_text('"WSJKB"\n"AF4"\n"7SV9"\n"XAN5T"\n')
    (folder / "few_words.yaml").write_text("base: words\nn: 24\nseeds: 1\nsampler: {width: 48}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        assert main(["train", *GAMED, "trainer.output_dir=run"]) == 0
    return folder


@pytest.mark.slow
def test_a_reward_that_is_gamed_is_told_of(gamed: Path) -> None:
    rows = {row["step"]: row for row in read_rows(gamed / "run")}
    assert [step for step, row in rows.items() if "suite/few_words/change" in row] == [4, 8]
    assert rows[8]["reward/mean"] > rows[1]["reward/mean"] + 0.05
    assert rows[8]["suite/few_words/change_high"] < 0
    lines = (gamed / "run" / "health.jsonl").read_text().splitlines()
    told = [row["message"] for row in map(json.loads, lines) if "suite/" in row["message"]]
    assert len(told) == 1
    assert told[0].startswith("suite/few_words/change is -0.")
    assert "reward/mean has risen by 0." in told[0]
    assert 'id="suites"' in (gamed / "run" / "report.html").read_text()


@pytest.mark.slow
def test_evaluate_agrees_with_the_training(
    gamed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exported LoRA is the averaged one that the last evaluation asked."""
    monkeypatch.chdir(gamed)
    monkeypatch.syspath_prepend(gamed)
    words = ["evaluate", "run", "--suite", "few_words.yaml", "--trust"]
    assert main(words) == 0
    assert "suite few_words, protocol" in capsys.readouterr().out
    last = read_rows(gamed / "run")[-1]
    stored = json.loads((gamed / "run" / "suites" / "few_words.json").read_text())
    found = stored["comparisons"]["reward"]
    assert (stored["sampler"]["height"], stored["sampler"]["width"]) == (32, 48)
    run = gamed / "run"
    lora = LoraExport(step=8, tensors={})
    card = write_model_card(gamed, run, stored_config(run / "config.yaml"), lora)
    protocol = f"{stored['digest']}, height 32, width 48"
    environment = json.loads((run / "environment.json").read_text())
    assert environment["suites"]["few_words"].startswith(protocol)
    report = (run / "report.html").read_text()
    for text in (card.read_text(), report, report.partition("Suite few_words")[0]):
        assert protocol in text
    assert found["change"]["mean"] == pytest.approx(last["suite/few_words/change"], abs=1e-12)
    assert found["tuned"]["mean"] == pytest.approx(last["suite/few_words/reward"], abs=1e-12)
    assert "Suite few_words: 24 prompts, 1 samples" in report
    scores = flowgrpo_rc.evaluate("run", suites=["few_words.yaml"], trust=True)
    change = scores.suites["few_words"].comparisons["reward"].change
    assert change.mean == pytest.approx(found["change"]["mean"], abs=1e-12)
    assert capsys.readouterr().out == ""
    with pytest.raises(ValueError, match=r"saturation:saturation.*trust=True"):
        flowgrpo_rc.evaluate("run", suites=["few_words.yaml"])


@pytest.mark.slow
def test_a_run_that_goes_on_gets_the_same_answers(
    train: Train, tmp_path: Path, prompt_file: Path
) -> None:
    (tmp_path / "small.yaml").write_text(
        f"prompts: {prompt_file}\nreward: {{terms: {{jpeg: {{}}}}}}\nn: 3\n"
    )
    settings = ("trainer.suites=[small.yaml]", "trainer.test_freq=1")
    run = stopped_and_whole(train, tmp_path, *settings)
    changes = [row["suite/small/change"] for row in read_rows(run)]
    assert changes[0] == 0  # a new LoRA changes nothing
    assert changes[2] != 0


@pytest.mark.parametrize(
    ("suites", "message"),
    [
        ("[geneval]", "did you mean 'geneval-style'?"),
        ("[lost.yaml]", "suite lost.yaml: reward.terms.own: path='lost:score': there is no module"),
        ("[words,words]", "two suites are called 'words'"),
        ("[words] trainer.test_freq=-1", "has no effect with trainer.test_freq=-1"),
    ],
)
def test_wrong_suites_are_refused_before_a_model_is_loaded(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str], suites: str, message: str
) -> None:
    (tmp_path / "lost.yaml").write_text(
        "base: words\nreward: {terms: {own: {_target_: function, path: 'lost:score'}}}\n"
    )
    # A run could not get past its model, which is not there.
    given = f"trainer.suites={suites} model.path=someone/nothing".split()
    for further in ([], ["--dry-run"]):
        assert train(*given, *further) == 2
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_suite_is_checked_before_the_run_is_loaded(gamed, monkeypatch, capsys, caplog) -> None:
    monkeypatch.chdir(gamed)

    def refused(*words: str) -> str:
        assert main(["evaluate", "run", *words]) == 2
        return capsys.readouterr().err

    # The run names a reward of its own.
    assert "reward.terms.saturation.path=saturation:saturation" in refused("--suite", "words")
    assert "did you mean 'words'?" in refused("--trust", "--suite", "word")
    # A benchmark's protocol is pinned, and the bundled model is small.
    told = refused("--trust", "--suite", "ocr")
    assert "suite ocr: sampler.height=512: this model" in told
    assert "`sampler` in its file" in told
    assert "`base: ocr`" in told
    assert "suite ocr pins height=512, width=512, num_inference_steps=40" in caplog.text
    override = "rollout.val_kwargs.num_inference_steps="
    told = refused("--trust", "--suite", "ocr", f"{override}20")
    assert f"{override}20 does not reach suite ocr, which pins num_inference_steps=40" in told
    assert "`base: ocr`" in told
    # The same number is no other sampler, and another suite follows the run.
    assert "sampler.height=512" in refused("--trust", "--suite", "ocr", f"{override}40")
    assert "no file nothing.yaml" in refused("--trust", "--suite", "nothing.yaml")
