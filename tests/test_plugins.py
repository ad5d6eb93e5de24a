"""How plug-ins are found and built."""

from __future__ import annotations

import pytest

from flowgrpo_rc.plugins import available_plugins, build, load_class
from flowgrpo_rc.rewards.base import Reward, Scores
from flowgrpo_rc.rewards.jpeg import Jpeg
from flowgrpo_rc.rollout.engine import RolloutEngine

HERE = __name__
PACKAGE = "flowgrpo_rc.rewards"


class Constant(Reward):
    """A reward outside the package, with an option that has no default."""

    def __init__(self, *, value: float) -> None:
        self.value = value

    def __call__(self, images, prompts):
        return Scores(values=[self.value] * len(images))


class Unfinished(Reward):
    """An abstract reward: it lacks __call__."""


class NotAReward:
    pass


def test_finds_a_plug_in_by_its_module():
    assert load_class(PACKAGE, "jpeg", Reward) is Jpeg
    assert load_class(PACKAGE, f"{HERE}.Constant", Reward) is Constant
    assert {"clip", "jpeg", "ocr", "remote"} <= set(available_plugins(PACKAGE, Reward))


@pytest.mark.parametrize("name", ["diffusers", "transformers", "vllm", "vllm_omni"])
def test_the_ending_of_an_engine_may_be_left_out(name):
    short, full = (
        load_class("flowgrpo_rc.rollout", n, RolloutEngine) for n in (name, f"{name}_engine")
    )
    assert short is full
    assert full.__module__ == f"flowgrpo_rc.rollout.{name}_engine"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("jpg", r"no plug-in 'jpg' \(did you mean 'jpeg'\?\); available: aesthetic, clip, edit_"),
        ("nothing_like_it", r"no plug-in 'nothing_like_it'; available: aesthetic, clip, edit_rew"),
        ("base", "must define one concrete subclass of Reward; it has: none"),
        ("no_such_package.module.Class", "there is no module 'no_such_package.module'"),
        (f"{HERE}.Missing", "has no class 'Missing'"),
        (f"{HERE}.NotAReward", "is not a subclass of flowgrpo_rc.rewards.base.Reward"),
        (f"{HERE}.Unfinished", "is abstract: it lacks __call__"),
        (f"{HERE}.images", "has no class 'images'"),
        ("..relative.Class", "there is no module"),
        ("json.decoder.deeper.Class", "there is no module 'json.decoder.deeper'"),
    ],
)
def test_plug_ins_that_do_not_load(name, message):
    with pytest.raises(ValueError, match=message):
        load_class(PACKAGE, name, Reward)


def test_a_failing_import_inside_a_plug_in_is_shown_as_it_is(tmp_path, monkeypatch):
    (tmp_path / "plug_in_with_a_hole.py").write_text("import a_library_nobody_has\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_library_nobody_has"):
        load_class(PACKAGE, "plug_in_with_a_hole.Reward", Reward)


@pytest.mark.parametrize(
    ("cls", "options", "message"),
    [
        (Jpeg, {"qualty": 3}, r"\.qualty: unknown option \(did you mean 'quality'\?\); allowed: o"),
        (Jpeg, {"objective": "small"}, r": objective='small': allowed are compressibility, incom"),
        (Jpeg, {"quality": 0}, r": quality=0: give a whole number from 1 to 95"),
        (Jpeg, {"quality": "high"}, r": quality='high': give a whole number"),
        (Constant, {}, r": Constant needs the option value"),
    ],
)
def test_options_that_do_not_fit(cls, options, message):
    with pytest.raises(ValueError, match=rf"reward\.terms\.x{message}"):
        build(cls, options, "reward.terms.x")
