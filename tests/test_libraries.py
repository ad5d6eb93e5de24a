"""The libraries of models are silent for a while, and then as they were."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from functools import partial
from importlib import import_module

import pytest
import torch
from support.launching import ran
from support.ray import needs_ray

from flowgrpo_rc import train
from flowgrpo_rc.libraries import ALLOCATOR, quiet, set_allocator


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


# Says what torch would read at its import, which the command itself leaves out here.
READS = f"""
import os, sys
from flowgrpo_rc import cli, libraries
class Torch:
    def find_spec(self, name, *_):
        if name == "torch":
            given = {{name: os.environ[name] for name in {ALLOCATOR} if name in os.environ}}
            print(given, flush=True)
            os._exit(0)
sys.meta_path.insert(0, Torch())
libraries.version = lambda _: sys.argv[1]
cli.main(["doctor"])
"""


@pytest.mark.parametrize("own", [{}, *({name: "max_split_size_mb:64"} for name in ALLOCATOR)])
@pytest.mark.parametrize(("release", "name"), [("2.9.1+cu126", 1), ("2.10.0a0", 0)])
def test_torch_grows_its_blocks_unless_the_user_sets_its_allocator(own, release, name):
    others = {name: value for name, value in os.environ.items() if name not in ALLOCATOR}
    done = ran(sys.executable, "-c", READS, release, env=others | own)
    assert done.stdout.split("\n")[0] == str(own or {ALLOCATOR[name]: "expandable_segments:True"})


@needs_ray
def test_runs_from_python_and_workers_grow_blocks_unless_torch_has_begun(monkeypatch) -> None:
    from flowgrpo_rc.workers.worker import Worker

    for name in ALLOCATOR:
        monkeypatch.setenv(name, "")  # so that it is as before afterwards
        monkeypatch.delenv(name)
    with monkeypatch.context() as begun:
        begun.setattr(torch.cuda, "is_initialized", lambda: True)
        set_allocator()
        assert not any(name in os.environ for name in ALLOCATOR)
    for start in (partial(Worker, torch.get_num_threads()), partial(train, ["rollout.n=0"])):
        with suppress(ValueError):
            start()
        assert os.environ.pop(ALLOCATOR[0]) == "expandable_segments:True"
