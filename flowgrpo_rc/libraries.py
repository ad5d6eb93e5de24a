"""The libraries of models, without the notices and progress bars that would bury a run's lines."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module


@contextmanager
def quiet(*libraries: str) -> Iterator[None]:
    """Silences libraries meanwhile; errors are still told.

    Args:
      *libraries: `transformers`, `diffusers`, or both. They are imported, which takes seconds.
    """
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
