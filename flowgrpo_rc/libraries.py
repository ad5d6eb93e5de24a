"""The libraries of models: without the notices and progress bars that would bury a run's lines,
without the Python code that a model may bring along, and without random numbers for lost weights.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

# Names of files of weights, as they are, in parts, or of a variant such as fp16.
_WEIGHTS = re.compile(
    r"(?:diffusion_pytorch_)?model(?:-\d+-of-\d+)?(?:\.(\w+))?(?:-\d+-of-\d+)?\.safetensors"
)
# Constants that older versions of the libraries wrote beside the weights.
_CONSTANTS = r"position_ids$|inv_freq$|masked_bias$"


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
def loading(where: str) -> Iterator[None]:
    """Names a model, or a part of one, that a library cannot load, or only with code of its own."""
    from flowgrpo_rc.reading import blaming

    with blaming(where):
        try:
            yield
        except ValueError as error:
            if "trust_remote_code" not in str(error):
                raise
            raise ValueError(
                f"{where} needs Python code that comes with the model, and such code is never run: "
                "give a model whose classes transformers and diffusers have themselves"
            ) from error


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


def load_weights(cls: Any, place: str, where: str, *, spare: str = "$^", **options: Any) -> Any:
    """Loads a model of transformers or diffusers from safetensors, with all of its weights.

    Args:
      cls: the class, which has `from_pretrained`.
      place: the model's own folder, or a hub id.
      where: what to blame, such as the setting that names the model.
      spare: regular expression of tensors that the files may hold besides.
      options: further arguments of `from_pretrained`.

    Raises:
      ValueError: weights are missing, unknown, quantized, not finite or of another shape, or a
        file holds none; it names tensor and file. transformers alone would fill the gaps with
        random numbers.
    """
    import torch

    from flowgrpo_rc.reading import read_mapping

    folder = Path(place)
    given = f"{where}: {folder.name}"
    files = sorted(folder.glob("*.safetensors"))
    settings = folder / "config.json"
    if folder.is_dir() and not files:
        raise ValueError(
            f"{given} has no *.safetensors; if its repository of the Hub has one variant alone, "
            "such as fp16, give the folder that `hf download NAME --local-dir FOLDER` makes"
        )
    with loading(given):
        whole = [name for each in files for name in _integers(each, given)]
        if settings.is_file() and read_mapping(settings).get("quantization_config") is not None:
            raise ValueError(
                f"{given}/{settings.name} sets quantization_config: give weights that are not "
                "quantized"
            )
        model, report = cls.from_pretrained(
            place,
            variant=_variant(file.name for file in files),
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # the report has them
            output_loading_info=True,
            **options,
        )
    file = f"{folder.name}/{files[0].name}" if len(files) == 1 else f"the files of {place}"
    kind = type(model).__name__
    unknown = [key for key in report["unexpected_keys"] if not re.search(spare, key)]
    unknown = [key for key in unknown if not re.search(_CONSTANTS, key)]
    shapes = {key: (list(found), list(own)) for key, found, own in report["mismatched_keys"]}
    missing = set(report["missing_keys"]) - shapes.keys()
    if missing:
        raise ValueError(f"{where}: {file} lacks {_first(missing)}, which a {kind} needs")
    if shapes:
        name, (found, own) = min(shapes.items())
        raise ValueError(f"{where}: {name} is {found} in {file}, and has to be {own} in a {kind}")
    if unknown:
        raise ValueError(f"{where}: {file} holds {_first(unknown)}, which no {kind} has")
    if whole:
        raise ValueError(f"{where}: {file} holds {_first(whole)} in integers, which are no weights")
    # A sum is finite only if all of its numbers are, and needs no mask of their size.
    sums = {name: one.sum(dtype=torch.float32) for name, one in model.named_parameters()}
    odd = [name for name, total in sums.items() if not total.isfinite()]
    if odd:
        raise ValueError(f"{where}: {file} holds numbers that are not finite in {_first(odd)}")
    return model


def load_tokenizer(cls: Any, place: str, where: str, **options: Any) -> Any:
    """Loads a tokenizer. ValueError if its vocabulary is lost, without which all text is unknown.

    The arguments are those of `load_weights`.
    """
    with loading(where):
        tokenizer = cls.from_pretrained(place, **options)
    folder, files = Path(place, options.get("subfolder", "")), dict(tokenizer.vocab_files_names)
    whole = files.pop("tokenizer_file", None)  # None: tokens are bytes, or it has raised
    others = files.values() or ["tokenizer.model"]
    lost = [name for name in others if not (folder / name).is_file()]
    if whole and lost and folder.is_dir() and not (folder / whole).is_file():
        raise ValueError(f"{where} has neither {whole} nor {', '.join(lost)}")
    return tokenizer


def _first(names: Collection[str]) -> str:
    first, others = sorted(names)[:2], len(names) - 2
    return ", ".join(first) + (f" and {others} more" if others > 0 else "")


def _variant(names: Iterable[str]) -> str | None:
    """Returns the variant whose weights alone are there, such as fp16; None for plain ones."""
    found = {match[1] for name in names if (match := _WEIGHTS.fullmatch(name))}
    if None in found or not found:
        return None
    if len(found) > 1:
        raise ValueError(f"it has weights of the variants {', '.join(sorted(found))}: keep one")
    return found.pop()


def _integers(file: Path, given: str) -> list[str]:
    """Returns the names of weights that a file holds as integers; libraries cast them."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as stored:
            names = [name for name in stored.keys() if name.endswith("weight")]  # noqa: SIM118
            kinds = {name: stored.get_slice(name).get_dtype() for name in names}
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{given}/{file.name} is no whole file of weights") from error
    return [name for name, kind in kinds.items() if not kind.startswith(("F", "BF"))]
