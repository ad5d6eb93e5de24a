"""Reading what other people may have written: small JSON files, weights and tokenizers, and blame
for what is damaged or cannot be had from the Hub.

No Python code that a model brings along is run, and no random numbers stand for lost weights.
"""

import json
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
)

ANSWER_S = 5.0  # for the Hub to answer a first question
_MOST_BYTES = 64 * 2**20
_MOST_LEVELS = 100  # of lists and mappings inside of one another; readers walk them by recursion
# Names of files of weights, as they are, in parts, or of a variant such as fp16.
_WEIGHTS = re.compile(
    r"(?:diffusion_pytorch_)?model(?:-\d+-of-\d+)?(?:\.(\w+))?(?:-\d+-of-\d+)?\.safetensors"
)
# Constants that older versions of the libraries wrote beside the weights.
_CONSTANTS = r"position_ids$|inv_freq$|masked_bias$"


def read_mapping(path: Path) -> dict[str, Any]:
    """Reads a JSON file that holds a mapping, neither too large nor too deep."""
    if path.stat().st_size > _MOST_BYTES:
        raise ValueError(f"{path} cannot be read: it has more than {_MOST_BYTES >> 20} MiB")
    with blaming(path):
        return parse_mapping(path.read_bytes())


def parse_mapping(text: str | bytes, *, unique: bool = False) -> dict[str, Any]:
    """Parses JSON that holds a mapping, nested no deeper than readers can walk.

    With `unique`, a key that stands twice is refused; else its last value counts.
    """
    try:
        mapping = json.loads(text, object_pairs_hook=_unique if unique else None)
    except RecursionError as error:
        raise ValueError(f"it is nested deeper than {_MOST_LEVELS} levels") from error
    if not isinstance(mapping, dict):
        raise ValueError("it holds no mapping")
    level: list[Any] = [mapping]
    for _ in range(_MOST_LEVELS):
        nodes = [node.values() if isinstance(node, dict) else node for node in level]
        level = [item for node in nodes for item in node if isinstance(item, dict | list)]
        if not level:
            return mapping
    raise ValueError(f"it is nested deeper than {_MOST_LEVELS} levels")


@contextmanager
def blaming(what: Path | str) -> Iterator[None]:
    """Names a file, or a setting and its file, in every error that comes of its content."""
    try:
        yield
    # Every exception, since libraries raise what they like where they expect another content.
    except Exception as error:
        if str(what) in str(error):
            raise
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        first = (reason or type(error).__name__).splitlines()[0]
        raise ValueError(f"{what} cannot be read: {first}") from error


@contextmanager
def loading(where: str) -> Iterator[None]:
    """Names a model, or a part of one, that a library cannot load, or only with code of its own."""
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

    folder = Path(place)
    blamed = f"{where}: {folder.name}"
    files = sorted(folder.glob("*.safetensors"))
    settings = folder / "config.json"
    if folder.is_dir() and not files:
        raise ValueError(
            f"{blamed} has no *.safetensors; if its repository of the Hub has one variant alone, "
            "such as fp16, give the folder that `hf download NAME --local-dir FOLDER` makes"
        )
    with loading(blamed):
        integers = [name for file in files for name in _integers(file, blamed)]
        if settings.is_file() and read_mapping(settings).get("quantization_config") is not None:
            raise ValueError(
                f"{blamed}/{settings.name} sets quantization_config: give weights that are not "
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
    source = f"{folder.name}/{files[0].name}" if len(files) == 1 else f"the files of {place}"
    kind = type(model).__name__
    unknown = [key for key in report["unexpected_keys"] if not re.search(spare, key)]
    unknown = [key for key in unknown if not re.search(_CONSTANTS, key)]
    mismatched = report["mismatched_keys"]
    shapes = {key: (list(stored), list(needed)) for key, stored, needed in mismatched}
    missing = set(report["missing_keys"]) - shapes.keys()
    name, (stored, needed) = min(shapes.items(), default=("", ("", "")))
    for at_fault, fault in (
        (missing, f"{source} lacks {_first(missing)}, which a {kind} needs"),
        (shapes, f"{name} is {stored} in {source}, and has to be {needed} in a {kind}"),
        (unknown, f"{source} holds {_first(unknown)}, which no {kind} has"),
        (integers, f"{source} holds {_first(integers)} in integers, which are no weights"),
    ):
        if at_fault:
            raise ValueError(f"{where}: {fault}")
    # A sum is finite only if all of its numbers are, and needs no mask of their size.
    weights = model.named_parameters()
    sums = {name: weight.sum(dtype=torch.float32) for name, weight in weights}
    odd = [name for name, total in sums.items() if not total.isfinite()]
    if odd:
        raise ValueError(f"{where}: {source} holds numbers that are not finite in {_first(odd)}")
    return model


def load_tokenizer(cls: Any, place: str, where: str, **options: Any) -> Any:
    """Loads a tokenizer. ValueError if its vocabulary is lost, without which all text is unknown.

    The arguments are those of `load_weights`.
    """
    with loading(where):
        tokenizer = cls.from_pretrained(place, **options)
    folder = Path(place, options.get("subfolder", ""))
    files = dict(tokenizer.vocab_files_names)
    whole = files.pop("tokenizer_file", None)  # None: tokens are bytes, or it has raised
    vocabulary = files.values() or ["tokenizer.model"]
    lost = [name for name in vocabulary if not (folder / name).is_file()]
    if whole and lost and folder.is_dir() and not (folder / whole).is_file():
        raise ValueError(f"{where} has neither {whole} nor {', '.join(lost)}")
    return tokenizer


def check_on_hub(repository: str, names: Sequence[str], *, key: str) -> None:
    """Raises ValueError that names the key if none of the files can be had; fetches nothing.

    A file can be had if it is in the cache, or if the Hub answers a HEAD request for it.
    """
    if any(isinstance(try_to_load_from_cache(repository, name), str) for name in names):
        return
    with asking_hub(repository, " and no ".join(names), key=key):
        for name in names:
            try:
                ask_hub(repository, name)
                return
            except RemoteEntryNotFoundError:
                if name == names[-1]:
                    raise


def ask_hub(repository: str, name: str) -> None:
    """Asks the Hub for a file by one HEAD request; a download would try for half a minute.

    Raises LocalEntryNotFoundError without an answer, and HfHubHTTPError for one that refuses.
    """
    try:
        get_hf_file_metadata(hf_hub_url(repository, name), timeout=ANSWER_S)
    except HfHubHTTPError:
        raise
    # The border to the library, which raises what its own library of requests does.
    except Exception as error:
        raise LocalEntryNotFoundError(f"no answer: {error}") from error


@contextmanager
def asking_hub(repository: str, name: str, *, key: str) -> Iterator[None]:
    """Turns what the Hub refuses of a file into a ValueError with the key and what helps."""
    try:
        yield
    except (EntryNotFoundError, HfHubHTTPError, HFValidationError) as error:
        raise ValueError(f"{key}={repository}: {_refusal(error, repository, name, key)}") from error


def _refusal(error: Exception, repository: str, name: str, key: str) -> str:
    """Returns why the Hub refuses a file, and what helps."""
    log_in = "log in with `hf auth login` or set HF_TOKEN"
    match error:
        case LocalEntryNotFoundError():
            cause = error.__cause__
            if isinstance(cause, HfHubHTTPError):
                return f"the Hub refuses {name}: {cause}"
            return _no_network(repository, cause, key)
        case EntryNotFoundError():
            return f"this repository of the Hub has no {name}"
        case GatedRepoError():
            return (
                "the Hub asks you to accept the licence of this model: do so at "
                f"{constants.ENDPOINT}/{repository}, then {log_in}"
            )
        case RepositoryNotFoundError():
            return (
                "the Hub shows no such repository to you: correct the id, or, if it is private, "
                f"{log_in}"
            )
        case HFValidationError():
            return f"there is no such folder, and {error}"
        case _:
            return f"the Hub refuses {name}: {error}"


def _no_network(repository: str, cause: BaseException | None, key: str) -> str:
    """Returns why a file that is not in the cache could not be fetched, and what helps."""
    why = f"{constants.ENDPOINT} cannot be reached ({cause})"
    if constants.HF_HUB_OFFLINE:
        why = "HF_HUB_OFFLINE forbids to fetch it"
    folder = repository.rpartition("/")[2]
    return (
        f"it is not in the local cache, and {why}; there is no local folder of this name either. "
        f"On a machine with network: hf download {repository} --local-dir {folder} (after hf auth "
        f"login, if its licence asks for it); then copy the folder here and set {key}={folder}"
    )


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"it has {max(names, key=names.count)!r} twice")
    return mapping


def _first(names: Collection[str]) -> str:
    first = ", ".join(sorted(names)[:2])
    return first if len(names) < 3 else f"{first} and {len(names) - 2} more"


def _variant(names: Iterable[str]) -> str | None:
    """Returns the variant whose weights alone are there, such as fp16; None for plain ones."""
    variants = {match[1] for name in names if (match := _WEIGHTS.fullmatch(name))}
    if None in variants or not variants:
        return None
    if len(variants) > 1:
        raise ValueError(f"it has weights of the variants {', '.join(sorted(variants))}: keep one")
    return variants.pop()


def _integers(file: Path, blamed: str) -> list[str]:
    """Returns the names of weights that a file holds as integers; libraries cast them."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as stored:
            names = [name for name in stored.keys() if name.endswith("weight")]  # noqa: SIM118
            kinds = {name: stored.get_slice(name).get_dtype() for name in names}
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{blamed}/{file.name} is no whole file of weights") from error
    return [name for name, kind in kinds.items() if not kind.startswith(("F", "BF"))]
