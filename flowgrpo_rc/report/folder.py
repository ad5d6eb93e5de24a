"""Reads the files of a run's folder for the pages. Each may be missing."""

import re
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from flowgrpo_rc.evaluation.held_out import NUM_FOLLOWED
from flowgrpo_rc.files import plain_yaml
from flowgrpo_rc.reading import blaming, parse_mapping, read_mapping
from flowgrpo_rc.records.checkpoint import list_checkpoints
from flowgrpo_rc.records.metrics_file import MetricsFile, Row
from flowgrpo_rc.records.run_folder import RunFolder, flat_settings
from flowgrpo_rc.records.samples import png_bytes, read_grid
from flowgrpo_rc.redaction import redact

Samples = dict[str, list[Any]]  # as `side_by_side` returns them
_THUMBNAIL = 128  # pixels of the longer side of a small picture


def metrics(run_dir: Path) -> list[Row]:
    """Returns the rows of metrics.jsonl. ValueError if there is none, or it is damaged."""
    file = MetricsFile(run_dir / "metrics.jsonl")
    if not file.path.is_file():
        why = "or its first evaluation goes on: it has no metrics.jsonl"
        raise ValueError(f"{run_dir} is not the folder of a run, {why}")
    return file.numbers()


def config(run_dir: Path) -> dict[str, object]:
    """Returns the resolved configuration without secrets; ValueError if it is damaged."""
    path = run_dir / "config.yaml"
    if not path.is_file():
        return {}
    with blaming(path):
        return {str(key): value for key, value in redact(plain_yaml(path)).items()}


def environment(run_dir: Path) -> Row:
    """Returns the machine and the versions that the run had; ValueError if they are damaged."""
    return _mapping(RunFolder(run_dir).environment)


def decided(run_dir: Path) -> dict[str, str]:
    """Returns what the run decided at its start, by name; {} for a run that has not said so."""
    return {name: str(value) for name, value in _mapping(RunFolder(run_dir).decided).items()}


def _mapping(path: Path) -> Row:
    return dict(redact(read_mapping(path))) if path.is_file() else {}


def setting(tree: Mapping[str, object], name: str) -> Any:
    """Returns the value behind a dotted name; None if there is none."""
    value: Any = tree
    for key in name.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def title(run_dir: Path, config: Mapping[str, object]) -> str:
    """Returns the name of the experiment; without one, the name of the folder."""
    return str(setting(config, "trainer.experiment_name") or run_dir.resolve().name)


def leaves(tree: Mapping[str, object]) -> list[tuple[str, str]]:
    """Returns the leaves of a tree of mappings, with dotted names and values as text."""
    return [
        (name, " ".join(map(str, value)) if isinstance(value, list) else str(value))
        for name, value in flat_settings(tree).items()
    ]


def health(run_dir: Path) -> list[tuple[str, str]]:
    """Returns when and what the health check warned."""
    file = MetricsFile(run_dir / "health.jsonl")
    with blaming(file.path):
        return [(f"step {row['step']}", str(row["message"])) for row in file.rows()]


def first_and_last_samples(run_dir: Path) -> Samples:
    """Returns the first and the last held-out samples, as `side_by_side` does; {} for none."""
    for ending in ("png", "jsonl"):
        if files := sample_files(run_dir, ending):
            return side_by_side(files)
    return {}


def samples_over_time(run_dir: Path) -> Samples:
    """Returns a few held-out samples of some steps, as `side_by_side` does; {} for two steps."""
    for ending, most in (("png", 12), ("jsonl", 4)):
        files = _sample_files(run_dir, ending, "step|drawn")
        if len(files) > 2:
            columns = min(most, len(files))
            places = [round(i * (len(files) - 1) / (columns - 1)) for i in range(columns)]
            samples = side_by_side([files[place] for place in places], few=True)
            return {} if "grids" in samples else samples
    return {}


def sample_files(run_dir: Path, ending: str) -> list[tuple[str, Path]]:
    """Returns the samples of the first and the last evaluation, or the only one, by their steps."""
    files = _sample_files(run_dir, ending, "step")
    return files if len(files) < 2 else [files[0], files[-1]]


def _sample_files(run_dir: Path, ending: str, names: str) -> list[tuple[str, Path]]:
    matches = (
        (re.fullmatch(rf"({names})_(\d+)", path.stem), path)
        for path in (run_dir / "samples").glob(f"*.{ending}")
    )
    steps = dict(sorted((int(name[2]), path) for name, path in matches if name))
    return [(f"Step {step}", path) for step, path in steps.items()]


def side_by_side(
    files: Sequence[tuple[str, Path]], heading: str = "", *, few: bool = False
) -> Samples:
    """Puts samples of the same subjects together, from labels and files of grids or of texts.

    With `few` only the first four samples of a file, and small pictures.

    Returns one of these. stacks: subject, and label and PNG of each picture of it. grids: label and
    PNG of grids that do not show the same subjects. tables: heading, names and rows of texts.
    """
    if files[0][1].suffix == ".jsonl":
        names, rows = _responses(files)
        return {"tables": [(heading, names, rows[:NUM_FOLLOWED] if few else rows)]}
    grids = [read_grid(path)[: NUM_FOLLOWED if few else None] for _, path in files]
    if few:
        for tile in chain.from_iterable(grids):
            tile.image.thumbnail((_THUMBNAIL, _THUMBNAIL))
    subjects = [[tile.subject for tile in tiles] for tiles in grids]
    if any(subject != subjects[0] for subject in subjects):
        return {"grids": [(label, path.read_bytes()) for label, path in files]}
    stacks = []
    for stack in zip(*grids, strict=True):
        pictures = [
            (f"{label}: {tile.score}", png_bytes(tile.image))
            for (label, _), tile in zip(files, stack, strict=True)
        ]
        stacks.append((stack[0].subject, pictures))
    return {"stacks": stacks}


def checkpoints(run_dir: Path) -> list[tuple[str, str]]:
    """Returns checkpoints and exported weights with their sizes."""
    rows = []
    loras = (run_dir / "lora", run_dir / "lora_best")
    for folder in (*list_checkpoints(run_dir / "checkpoints"), *loras):
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        if folder.is_dir():
            rows.append((str(folder.relative_to(run_dir)), f"{size / 2**20:.1f} MiB"))
    return rows


def _responses(files: Sequence[tuple[str, Path]]) -> tuple[list[str], list[list[str | None]]]:
    """Returns names and rows of a table of responses, from label and file of each evaluation."""
    columns = [_by_prompt(path) for _, path in files]
    names = ["prompt", "target", *(name for label, _ in files for name in (label, "score"))]
    rows = [
        [*prompt, *(cell for column in columns for cell in column[prompt])]
        for prompt in columns[0]
        # Evaluations on other numbers of processes may show other prompts.
        if all(prompt in column for column in columns)
    ]
    return names, rows


def _by_prompt(path: Path) -> dict[tuple[str, str | None], tuple[str, str]]:
    responses = {}
    with blaming(path):
        for line in path.read_text(encoding="utf-8").split("\n"):
            if line:
                row = parse_mapping(line)
                score = "failed" if row["score"] is None else f"{row['score']:.2f}"
                responses[(row["prompt"], row["target"] or "")] = (row["completion"], score)
    return responses
