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
_GROWING, _FIXED = "expandable_segments:True", "expandable_segments:False"


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
    given = {name: environment[name] for name in ALLOCATOR if name in environment}
    return {name: value.replace(_GROWING, _FIXED) for name, value in given.items()}


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
