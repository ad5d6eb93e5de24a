"""The libraries of models without the notices, progress bars and questions that would bury a run's
lines, and what has to be set before torch uses a GPU.
"""

import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version

# Variables with the settings of torch's allocator; torch before 2.10 reads no general one.
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_GROWING = "expandable_segments:True"
_FIXED = "expandable_segments:False"


def set_allocator() -> None:
    """Lets torch grow its blocks of GPU memory, so that fewer gaps remain between tensors.

    torch reads them with its first tensor on a GPU, and this leaves them alone afterwards. Settings
    of the user stay as they are.
    """
    torch = sys.modules.get("torch")
    is_late = torch is not None and torch.cuda.is_initialized()
    if not is_late and not any(name in os.environ for name in ALLOCATOR):
        release = tuple(int(part) for part in version("torch").split(".")[:2])
        os.environ[ALLOCATOR[release < (2, 10)]] = _GROWING


def allocator_for_vllm(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns these variables without growing blocks, which vLLM's pool that sleeps refuses."""
    settings = {name: environment[name] for name in ALLOCATOR if name in environment}
    return {name: value.replace(_GROWING, _FIXED) for name, value in settings.items()}


@contextmanager
def quiet(*libraries: str) -> Iterator[None]:
    """Imports `transformers`, `diffusers` or both, and silences all but their errors meanwhile."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
    # diffusers imports torchao if it is installed, and that has notices of its own.
    # huggingface_hub tells of each try; what has failed in the end is told anyway.
    for name in ("torchao", "torch.utils._pytree", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.ERROR)
    loggers = [import_module(f"{library}.utils").logging for library in libraries]
    earlier = [(log.get_verbosity(), log.is_progress_bar_enabled()) for log in loggers]
    for library_logger in loggers:
        library_logger.set_verbosity_error()
        library_logger.disable_progress_bar()
    try:
        yield
    finally:
        for library_logger, (verbosity, has_bars) in zip(loggers, earlier, strict=True):
            library_logger.set_verbosity(verbosity)
            if has_bars:
                library_logger.enable_progress_bar()


@contextmanager
def unasked() -> Iterator[None]:
    """Takes the standard input away meanwhile, so that libraries refuse where they would ask.

    Use it in one thread: several would give back each other's input.
    """
    stdin = sys.stdin
    sys.stdin = None
    try:
        yield
    finally:
        sys.stdin = stdin
