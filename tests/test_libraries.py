"""The libraries of models are silent for a while, and then as they were."""

from __future__ import annotations

from importlib import import_module

import pytest

from flowgrpo_rc.libraries import quiet


@pytest.mark.parametrize("name", ["transformers", "diffusers"])
def test_a_library_is_quiet_for_a_while_only(name: str) -> None:
    told = import_module(f"{name}.utils").logging
    before = (told.get_verbosity(), told.is_progress_bar_enabled())
    told.set_verbosity_info()
    told.enable_progress_bar()
    try:
        with quiet(name):
            assert told.get_verbosity() == told.ERROR
            assert not told.is_progress_bar_enabled()
        assert told.get_verbosity() == told.INFO
        assert told.is_progress_bar_enabled()
    finally:
        told.set_verbosity(before[0])
        if not before[1]:
            told.disable_progress_bar()
