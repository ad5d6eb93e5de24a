"""Suites: what is read from their files, and what is refused with which words."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowgrpo_rc.evaluation.suite import bundled_suites, read_suite, read_suites

OWN = "prompts: own.txt\nreward: {terms: {jpeg: {weight: 2.0, quality: 80}}}\n"


def with_reward(terms: str) -> str:
    return f"prompts: own.txt\nreward: {{terms: {{{terms}}}}}\n"


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A suite in a folder that is not the working directory."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "own.txt").write_text("".join(f"prompt {i}\n" for i in range(10)))
    path = folder / "mine.yaml"
    path.write_text(OWN)
    return path


def test_a_prompt_that_its_reward_cannot_score_is_named_with_its_line(own: Path) -> None:
    own.write_text(with_reward("ocr: {}"))
    (own.parent / "own.txt").write_text('a "CAFE"\na "ЖУК"\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"mine\.yaml: prompts: .*own\.txt, line 2: .*ocr: .*'ж'"):
        read_suites([str(own)], "image")


@pytest.mark.parametrize("name", bundled_suites())
def test_bundled_suites_are_whole(name: str) -> None:
    suite = read_suite(name)
    assert suite.name == name
    assert len(suite.prompts) >= 64
    assert suite.seeds == 2
    if suite.by is not None:
        groups = suite.groups()
        assert len(set(groups)) >= 6
        assert len({groups.count(group) for group in groups}) == 1


def test_a_file_of_the_users(own: Path) -> None:
    suite = read_suite(str(own))
    assert suite.name == "mine"
    assert [prompt.text for prompt in suite.prompts] == [f"prompt {i}" for i in range(10)]
    assert suite.reward.terms == {"jpeg": {"weight": 2.0, "quality": 80}}
    own.write_text(f"{OWN}name: other\nseeds: 3\nn: 4\n")
    suite = read_suite(str(own))
    assert (suite.name, suite.seeds) == ("other", 3)
    # From all over the file.
    assert [prompt.index for prompt in suite.prompts] == [0, 2, 5, 7]


def test_a_base_and_other_prompts(own: Path) -> None:
    own.write_text("base: geneval-style\nn: 12\nreward: {terms: {jpeg: {}}}\n")
    suite = read_suite(str(own))
    assert (suite.name, suite.by, len(suite.prompts)) == ("mine", "tag", 12)
    assert suite.reward.terms == {"jpeg": {}}
    prompts = own.parent / "own.txt"
    prompts.write_text('A sign that says "one"\nA sign that says "two"\n')
    suite = read_suite(f"ocr:{prompts}")
    assert (suite.name, [prompt.target for prompt in suite.prompts]) == ("ocr", ["one", "two"])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("geneval", "no suite 'geneval' (did you mean 'geneval-style'?)"),
        ("drawbnch-style", "did you mean 'drawbench-style'?"),
        ("nothing.yaml", "there is no file nothing.yaml"),
        ("words:nothing.txt", "suite words:nothing.txt: prompts: there is no file"),
    ],
)
def test_an_unknown_suite_is_named(given: str, message: str) -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011 - the message is compared below
        read_suites([given], "image")
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("prompts: [own.txt", "is damaged"),
        (OWN.replace("prompts", "promts"), "unknown option (did you mean 'prompts'?)"),
        ("reward: {terms: {jpeg: {}}}", "needs the option prompts"),
        ("prompts: own.txt", "needs the option reward"),
        (f"{OWN}seeds: 0", "seeds: 0 must be a whole number of at least 1"),
        (f"{OWN}n: 1", "an interval needs at least 2"),
        (f"{OWN}name: a/b", "name: 'a/b' must be letters"),
        (f"{OWN}by: tag", "by: 'tag' is no field of prompt 0"),
        (f"{OWN}base: geneval", "base: 'geneval' is none of"),
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
        (f"{OWN[:-2]}, num_workers: two}}", "a value has the wrong type"),
    ],
)
def test_what_is_wrong_with_a_file_is_told(own: Path, content: str, message: str) -> None:
    own.write_text(content)
    with pytest.raises(ValueError) as refused:  # noqa: PT011 - the message is compared below
        read_suites([str(own)], "image")
    assert str(own) in str(refused.value)
    assert message in str(refused.value)


def test_a_reward_of_another_kind_and_a_name_twice(own: Path) -> None:
    with pytest.raises(ValueError, match=r"suite .*mine.yaml: reward.terms.jpeg scores images"):
        read_suites([str(own)], "text")
    with pytest.raises(ValueError, match="two suites are called 'mine'"):
        read_suites([str(own), str(own)], "image")
