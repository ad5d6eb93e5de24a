"""The libraries of models without the notices, progress bars and questions that would bury a run's
lines.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module


@contextmanager
def quiet(*libraries: str) -> Iterator[None]:
    """Imports `transformers`, `diffusers` or both, and silences all but their errors meanwhile."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
    # diffusers imports torchao if it is installed, and that has notices of its own.
    # huggingface_hub tells of each try; what has failed in the end is told anyway.
    for name in ("torchao", "torch.utils._pytree", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.ERROR)
    told = [import_module(f"{library}.utils").logging for library in libraries]
    earlier = [(one.get_verbosity(), one.is_progress_bar_enabled()) for one in told]
    for one in told:
        one.set_verbosity_error()
        one.disable_progress_bar()
    try:
        yield
    finally:
        for one, (verbosity, has_bars) in zip(told, earlier, strict=True):
            one.set_verbosity(verbosity)
            if has_bars:
                one.enable_progress_bar()


@contextmanager
def unasked() -> Iterator[None]:
    """Takes the standard input away meanwhile, so that libraries refuse where they would ask.

    Use it in one thread: several would give back each other's input.
    """
    given, sys.stdin = sys.stdin, None
    try:
        yield
    finally:
        sys.stdin = given
