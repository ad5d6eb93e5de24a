"""Suites: what is read from their files, and what is refused with which words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flowgrpo_rc.evaluation.suite import bundled_suites, read_suite, read_suites
from flowgrpo_rc.rollout.config import EvaluationConfig, RolloutConfig

OWN = "prompts: own.txt\nreward: {terms: {jpeg: {weight: 2.0, quality: 80}}}\n"


def with_reward(terms: str) -> str:
    return f"prompts: own.txt\nreward: {{terms: {{{terms}}}}}\n"


@pytest.fixture
def suite_file(tmp_path: Path) -> Path:
    """A suite in a folder that is not the working directory."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "own.txt").write_text("".join(f"prompt {i}\n" for i in range(10)))
    path = folder / "mine.yaml"
    path.write_text(OWN)
    return path


@pytest.mark.parametrize("name", bundled_suites())
def test_bundled_suites_are_whole(name: str) -> None:
    suite = read_suite(name)
    assert suite.name == name
    assert len(suite.prompts) >= 64
    assert suite.seeds == (4 if name == "geneval-style" else 2)
    # Of published benchmarks all is pinned; `words` is for first tries.
    assert bool(suite.sampler) is (name != "words")
    if suite.by is not None:
        groups = suite.groups()
        assert len(set(groups)) >= 6
        assert len({groups.count(group) for group in groups}) == 1


def test_a_file_of_the_users(suite_file: Path) -> None:
    suite = read_suite(str(suite_file))
    assert suite.name == "mine"
    assert [prompt.text for prompt in suite.prompts] == [f"prompt {i}" for i in range(10)]
    assert suite.reward.terms == {"jpeg": {"weight": 2.0, "quality": 80}}
    suite_file.write_text(f"{OWN}name: other\nseeds: 3\nn: 4\n")
    suite = read_suite(str(suite_file))
    assert (suite.name, suite.seeds) == ("other", 3)
    # From all over the file.
    assert [prompt.index for prompt in suite.prompts] == [0, 2, 5, 7]


def test_a_base_and_other_prompts(suite_file: Path) -> None:
    suite_file.write_text("base: geneval-style\nn: 12\nreward: {terms: {jpeg: {}}}\n")
    suite = read_suite(str(suite_file))
    assert (suite.name, suite.by, len(suite.prompts)) == ("mine", "tag", 12)
    assert suite.reward.terms == {"jpeg": {}}
    prompts = suite_file.parent / "own.txt"
    prompts.write_text('A sign that says "one"\nA sign that says "two"\n')
    suite = read_suite(f"ocr:{prompts}")
    assert (suite.name, [prompt.target for prompt in suite.prompts]) == ("ocr", ["one", "two"])


def test_the_digest_follows_what_a_number_depends_on(suite_file: Path) -> None:
    def digest(content: str, **run: int) -> str:
        suite_file.write_text(content)
        rollout = RolloutConfig(val_kwargs=EvaluationConfig(**run))
        return read_suite(str(suite_file)).protocol(rollout, text=False).digest

    first = digest(OWN)
    assert first == digest(f"{OWN}sampler: {{num_inference_steps: 40}}")  # as the run has it
    assert first == digest(OWN, batch_size=3)
    changed = [f"{OWN}seeds: 3", f"{OWN}n: 4", f"{OWN}sampler: {{height: 64}}"]
    changed.append(OWN.replace("80", "70"))
    assert len({first, digest(OWN, width=64), *map(digest, changed)}) == 6
    pinned = f"{OWN}sampler: {{width: 32}}"
    assert digest(pinned, width=64) == digest(pinned)


def test_a_base_keeps_the_keys_of_its_sampler_that_a_file_does_not_name(suite_file: Path) -> None:
    suite_file.write_text("base: ocr\nsampler: {height: 48, guidance_scale: null}\n")
    assert read_suite(str(suite_file)).sampler == {
        "height": 48,
        "width": 512,
        "num_inference_steps": 40,
    }


def test_an_unknown_suite_is_named() -> None:
    for source, message in (
        ("geneval", "no suite 'geneval' (did you mean 'geneval-style'?)"),
        ("drawbnch-style", "did you mean 'drawbench-style'?"),
        ("nothing.yaml", "there is no file nothing.yaml"),
        ("words:nothing.txt", "suite words:nothing.txt: prompts: there is no file"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            read_suites([source], "image")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("prompts: [own.txt", "is damaged"),
        (OWN.replace("prompts", "promts"), "unknown option (did you mean 'prompts'?)"),
        ("reward: {terms: {jpeg: {}}}", "needs the option prompts"),
        ("prompts: own.txt", "needs the option reward"),
        (f"{OWN}seeds: 0", "seeds: 0 must be a whole number of at least 1"),
        (f"{OWN}n: 1", "prompts for an interval=1: give at least 2"),
        (f"{OWN}name: a/b", "name: 'a/b' must be letters"),
        (f"{OWN}sampler: 40", "sampler: 40 must be keys of rollout.val_kwargs"),
        (f"{OWN}sampler: {{heigth: 64}}", "sampler.heigth: unknown (did you mean 'height'?)"),
        (f"{OWN}sampler: {{height: big}}", "sampler.height: 'big' must be a number (int)"),
        (f"{OWN}sampler: {{num_inference_steps: 0}}", "num_inference_steps=0: give at least 1"),
        (f"{OWN}sampler: {{temperature: 1}}", "sampler.temperature has no effect on image"),
        (f"{OWN}by: tag", "by: 'tag' is no field of prompt 0"),
        (f"{OWN}base: geneval", "base='geneval': allowed are"),
        ("prompts: own.txt\nreward: {jpeg: {}}", "as the section `reward` of a run"),
        (OWN.replace("jpeg", "jpg"), "no plug-in 'jpg' (did you mean 'jpeg'?)"),
        (OWN.replace("quality", "qualty"), "reward.terms.jpeg.qualty: unknown option"),
        (with_reward("change: {_target_: jpeg}"), "'change'"),
        (with_reward("exact_match: {}"), "has no target"),
        (with_reward("clip: {path: /no}"), "no such folder"),
        (
            with_reward("vlm_preference: {path: a/b}"),
            "reward.terms.vlm_preference compares a group",
        ),
        (OWN.replace("terms", "trems"), "as the section `reward` of a run"),
        (f"{OWN[:-2]}, timeout_s: two}}", "timeout_s='two': give a number"),
    ],
)
def test_what_is_wrong_with_a_file_is_told(suite_file: Path, content: str, message: str) -> None:
    suite_file.write_text(content)
    with pytest.raises(ValueError, match=f"{re.escape(str(suite_file))}.*{re.escape(message)}"):
        read_suites([str(suite_file)], "image")


def test_what_prompts_rewards_and_names_do_not_allow(suite_file: Path) -> None:
    with pytest.raises(ValueError, match=r"suite .*mine.yaml: reward.terms.jpeg scores images"):
        read_suites([str(suite_file)], "text")
    with pytest.raises(ValueError, match="two suites are called 'mine'"):
        read_suites([str(suite_file), str(suite_file)], "image")
    suite_file.write_text(with_reward("ocr: {}"))
    (suite_file.parent / "own.txt").write_text('a "CAFE"\na "ЖУК"\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"mine\.yaml: prompts: .*own\.txt, line 2: .*ocr: .*'ж'"):
        read_suites([str(suite_file)], "image")
