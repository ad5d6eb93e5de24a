"""Sections of the report about a run's files other than metrics.

Each says so if its file is missing.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from PIL import Image

from flowgrpo_rc.files import plain_yaml
from flowgrpo_rc.reading import blaming, parse_mapping, read_mapping
from flowgrpo_rc.records.metrics_file import MetricsFile
from flowgrpo_rc.records.rejected import in_words, read_rejected
from flowgrpo_rc.records.samples import read_grid
from flowgrpo_rc.redaction import redact
from flowgrpo_rc.report import html
from flowgrpo_rc.report.facts import broken_band, setting

NO_WARNING = html.empty("None.")
_MAX_REJECTED = 12
_MAX_TEXT = 1000  # characters of a prompt or a response


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Returns the rows of metrics.jsonl. ValueError if there is none, or it is damaged."""
    file = MetricsFile(run_dir / "metrics.jsonl")
    if not file.path.is_file():
        raise ValueError(f"{run_dir} is not the folder of a run: it has no metrics.jsonl")
    return file.numbers()


def title(run_dir: Path, config: Mapping[str, Any]) -> str:
    """Returns the name of the experiment; without one, the name of the folder."""
    return str(setting(config, "trainer.experiment_name") or run_dir.resolve().name)


def samples(run_dir: Path) -> str:
    """Shows the first and the last held-out samples: pictures above one another, or texts."""
    grids = _by_step(run_dir / "samples", "png")
    texts = _by_step(run_dir / "samples", "jsonl")
    if grids:
        return pictures([(_caption(path), path) for path in grids])
    if texts:
        return responses([(_caption(path), path) for path in texts])
    return html.empty("No samples yet.")


def last_samples(runs: Sequence[tuple[str, Path]]) -> str:
    """Shows the samples of the last evaluation of some runs, from pairs of name and folder."""
    grids = [(name, _by_step(folder / "samples", "png")[-1:]) for name, folder in runs]
    found = [(name, paths[0]) for name, paths in grids if paths]
    body = pictures(found) if found else ""
    for name, folder in runs:
        texts = _by_step(folder / "samples", "jsonl")[-1:]
        found = [(_caption(path), path) for path in texts]
        body += html.note(name) + responses(found) if found else ""
    return body or html.empty("No samples yet.")


def pictures(grids: Sequence[tuple[str, Path]]) -> str:
    """Shows grids of samples, from pairs of label and path: what belongs together as a stack.

    If they are not of the same samples, each grid is shown as a whole.
    """
    tiles = [read_grid(path) for _, path in grids]
    subjects = [[tile.subject for tile in found] for found in tiles]
    if not subjects[0] or any(each != subjects[0] for each in subjects):
        return "".join(html.image(label, _data_uri(path)) for label, path in grids)
    stacks = []
    for stack in zip(*tiles, strict=True):
        shown = [
            (f"{label}: {tile.score}", _encoded(tile.image))
            for (label, _), tile in zip(grids, stack, strict=True)
        ]
        stacks.append((stack[0].subject, shown))
    return html.picture_stacks(stacks)


def _by_step(folder: Path, ending: str) -> list[Path]:
    """Returns the first and the last `step_N` file, or the only one."""
    found = folder.glob(f"step_*.{ending}")
    paths = sorted(path for path in found if re.fullmatch(r"step_\d+", path.stem))
    return paths if len(paths) < 2 else [paths[0], paths[-1]]


def _caption(path: Path) -> str:
    return f"Step {int(path.stem.removeprefix('step_'))}"


def responses(files: Sequence[tuple[str, Path]]) -> str:
    """Makes a table of responses, one row for each prompt that all evaluations show.

    Evaluations on different numbers of processes may show different prompts.

    Args:
      files: label and file of each evaluation.
    """
    columns = [_by_prompt(path) for _, path in files]
    captions = [name for label, _ in files for name in (label, "score")]
    shared = [prompt for prompt in columns[0] if all(prompt in column for column in columns)]
    rows = [
        (*prompt, *(cell for column in columns for cell in column[prompt])) for prompt in shared
    ]
    return html.columns(
        ("prompt", "target", *captions), [[_shown(cell) for cell in row] for row in rows]
    )


def _by_prompt(path: Path) -> dict[tuple[str, str | None], tuple[str, str]]:
    """Returns response and score by prompt and target."""
    with blaming(path):
        lines = path.read_text(encoding="utf-8").split("\n")
        rows = [parse_mapping(line) for line in lines if line]
        return {(row["prompt"], row["target"]): _response(row) for row in rows}


def _response(row: Mapping[str, Any]) -> tuple[str, str]:
    return row["completion"], "failed" if row["score"] is None else f"{row['score']:.2f}"


def _shown(cell: str | None) -> str:
    """Cuts a text that would make a table unreadable; the file has all of it."""
    text = cell or ""
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."


def _data_uri(path: Path) -> str:
    return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode('ascii')}"


def _encoded(picture: Image.Image) -> str:
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"


def health(run_dir: Path) -> str:
    """Lists the health warnings."""
    file = MetricsFile(run_dir / "health.jsonl")
    rows = file.rows()
    if not rows:
        return NO_WARNING
    with blaming(file.path):
        return html.warnings([(f"step {row['step']}", str(row["message"])) for row in rows])


def rejected(run_dir: Path, config: Mapping[str, Any]) -> str:
    """Shows the newest rejected samples, each with its worst step and the bound that it broke.

    Args:
      run_dir: folder of the run.
      config: content of its config.yaml.
    """
    folder = run_dir / "rejected"
    with blaming(folder):
        return _rejected(folder, config)


def _rejected(folder: Path, config: Mapping[str, Any]) -> str:
    rows = read_rejected(folder)
    if not rows:
        return html.empty("None.")
    cards = []
    for row in rows[-_MAX_REJECTED:]:
        where = f"timestep {row['timestep']}" if "timestep" in row else f"token {row['position']}"
        numbers = {"log-ratio": row["log_ratio"], "reward": row["reward"]}
        lines = [_reason(reason, config) for reason in row["reasons"]]
        lines += [f"{name} {value:.3g}" for name, value in numbers.items() if value is not None]
        # Only the name, so that no page shows a file from elsewhere.
        picture = _data_uri(folder / Path(row["picture"]).name) if "picture" in row else None
        texts = [_shown(text) for text in (row["prompt"], row.get("text")) if text]
        cards.append(html.card(f"Step {row['step']}, {where}", picture, lines, texts))
    note = (
        f"The newest {len(cards)} of {len(rows)} that are in the folder; the worst few of each "
        "step are kept there."
    )
    return html.note(note) + html.cards(cards)


def _reason(reason: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Returns a reason in words; a band that moves is named as it was set."""
    text = in_words(reason)
    if reason.get("lower") is not None or reason.get("upper") is not None:
        return text
    band = broken_band(config, str(reason["criterion"]))
    return f"{text}, outside {band}" if band else text


def config(run_dir: Path) -> dict[str, Any]:
    """Returns the resolved configuration without secrets; {} if there is none.

    Raises:
      ValueError: config.yaml is damaged.
    """
    path = run_dir / "config.yaml"
    if not path.is_file():
        return {}
    with blaming(path):
        return {str(key): value for key, value in redact(plain_yaml(path)).items()}


def config_text(config: Mapping[str, Any]) -> str:
    """Shows the resolved configuration, folded."""
    if not config:
        return html.empty("The folder has no config.yaml.")
    return html.folded(
        "Resolved configuration", yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)
    )


def environment(run_dir: Path) -> dict[str, Any]:
    """Returns the machine and the versions that the run had; {} if they are not recorded.

    Raises:
      ValueError: environment.json is damaged.
    """
    path = run_dir / "environment.json"
    if not path.is_file():
        return {}
    return dict(redact(read_mapping(path)))


def environment_table(found: Mapping[str, Any]) -> str:
    """Shows the machine and the versions."""
    return html.table(flat(found)) if found else html.empty("The folder has no environment.json.")


def flat(value: Any, prefix: str = "") -> list[tuple[str, str]]:
    """Returns the leaves of a tree of mappings, with dotted names and values as text."""
    if isinstance(value, Mapping):
        return [
            row
            for key, item in value.items()
            for row in flat(item, f"{prefix}.{key}" if prefix else str(key))
        ]
    return [(prefix, " ".join(map(str, value)) if isinstance(value, list) else str(value))]


def checkpoints(run_dir: Path) -> str:
    """Lists checkpoints and exported weights with their sizes."""
    # A checkpoint that is not complete has another name.
    found = (run_dir / "checkpoints").glob("step_*")
    folders = [path for path in found if re.fullmatch(r"step_\d+", path.name)]
    folders.sort(key=lambda path: int(path.name.removeprefix("step_")))
    rows = [
        (str(path.relative_to(run_dir)), _size(path))
        for path in (*folders, run_dir / "lora")
        if path.is_dir()
    ]
    return html.table(rows) if rows else html.empty("None yet.")


def _size(folder: Path) -> str:
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return f"{size / 2**20:.1f} MiB"
