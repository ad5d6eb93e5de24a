"""The names that the package exports, which it imports when they are first used."""

from __future__ import annotations

from importlib import import_module

import pytest

import flowgrpo_rc


def test_public_names_are_in_the_modules_that_the_package_names() -> None:
    assert set(flowgrpo_rc._HOMES) == set(flowgrpo_rc.__all__)
    assert set(dir(flowgrpo_rc)) == {*flowgrpo_rc.__all__, "__version__"}
    for name, module in flowgrpo_rc._HOMES.items():
        own = vars(import_module(f"flowgrpo_rc.{module}"))[name]
        assert getattr(flowgrpo_rc, name) is own
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = flowgrpo_rc.nothing
