"""The model card of an exported LoRA: a README.md with the Hub's metadata and what was measured.

It is a function of the run's folder. Paths, hosts and secrets of the training machine stay out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from huggingface_hub import ModelCard, ModelCardData
from jinja2 import Environment, StrictUndefined
from torch import Tensor

from flowgrpo_rc.correction.config import RolloutCorrectionConfig
from flowgrpo_rc.evaluation.held_out import NUM_FOLLOWED
from flowgrpo_rc.exports.lora import export_lora
from flowgrpo_rc.files import write_atomic
from flowgrpo_rc.models.lora_files import EXPORT_NAMES
from flowgrpo_rc.models.networks import others_in
from flowgrpo_rc.reading import blaming, parse_mapping
from flowgrpo_rc.records.metrics_file import MetricsFile, Row
from flowgrpo_rc.records.run_folder import RunFolder
from flowgrpo_rc.records.samples import png_bytes, read_grid
from flowgrpo_rc.records.suite_files import read_suite_results
from flowgrpo_rc.redaction import redact
from flowgrpo_rc.report.charts import known
from flowgrpo_rc.report.folder import decided, environment
from flowgrpo_rc.report.series import points_of

if TYPE_CHECKING:
    from flowgrpo_rc.config.tree import Config

CARD_NAME = "README.md"
PICTURES = "images"  # the folder of the card's samples
_TAGS = ("lora", "reinforcement-learning", "grpo", "flowgrpo-rc")
# Title in the card, and the metric, which is averaged over the steps of the run.
_MEASURED = (
    ("Mismatch, mean of abs. log-prob difference", "logprob_abs_diff_mean"),
    ("Mismatch, 99th percentile", "logprob_abs_diff_p99"),
    ("Mismatch over what the precisions explain", "mismatch_over_expected"),
    ("Clipped by noise before any update, fraction", "pre_update_clip_fraction"),
    ("Rejected samples, fraction", "rollout_rs_seq_masked_fraction"),
    ("Effective sample size, fraction", "rollout_is_eff_sample_size"),
)
_DEFAULTS = {field.name: field.default for field in fields(RolloutCorrectionConfig)}
# What the card's own table or its first line says already.
_SAID = ("Model", "Reward", "LoRA", "Seed", "First prompt")


@dataclass(frozen=True, kw_only=True)
class LoraExport:
    """A LoRA of a run for other programs."""

    step: int
    tensors: Mapping[str, Tensor]
    raw: bool = False  # the last weights, not their average, which evaluations score
    source: str | None = None  # the repository that users load it from, if there is one
    subfolder: str = ""  # of that repository


def export_with_card(config: Config, run_dir: Path, lora: LoraExport, into: Path) -> Path:
    """Writes a LoRA and its card; returns the file with the tensors."""
    written = export_lora(lora.tensors, config.model, into)
    write_model_card(into, run_dir, config, lora)
    return written


def write_model_card(folder: Path, run_dir: Path, config: Config, lora: LoraExport) -> Path:
    """Writes `README.md` into the folder of a LoRA and returns its path."""
    rows = MetricsFile(run_dir / "metrics.jsonl").numbers()
    names, scores, evaluated = _scores(rows, lora.step)
    widget = [] if evaluated is None else _samples(folder, RunFolder(run_dir), evaluated)
    base = Path(config.model.path).name
    correction = config.algorithm.rollout_correction
    language = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    template = Path(__file__).with_name("model_card.md.jinja").read_text(encoding="utf-8")
    text = language.from_string(template).render(
        config=config,
        text=config.model.kind == "causal_lm",
        metadata=_metadata(config, widget),
        pictures=[sample["output"]["url"] for sample in widget if "url" in sample["output"]],
        hub_id=config.model.hub_id(),
        base=base,
        place=config.model.hub_id() or f"path/to/{base}",
        lora=lora,
        source=lora.source or "path/to/this/folder",
        subfolder=lora.subfolder if lora.source else "",
        others=others_in(lora.tensors),
        weight_name=EXPORT_NAMES["diffusion"],
        versions=_versions(run_dir),
        score_names=names,
        scores=scores,
        evaluated=evaluated,
        # They were asked of the run's last weights, averaged.
        suites=[] if lora.raw or not rows or rows[-1]["step"] != lora.step else _suites(run_dir),
        decided=[item for item in decided(run_dir).items() if item[0] not in _SAID],
        correction_set=[
            (name, value) for name, value in asdict(correction).items() if value != _DEFAULTS[name]
        ],
        measured=_measured(rows),
        warnings=MetricsFile(run_dir / "health.jsonl").rows(),
        steps=len(points_of(rows, "reward/mean")),
    )
    path = folder / CARD_NAME
    write_atomic(path, str(ModelCard(redact(text))).encode())
    return path


def check_card(folder: Path) -> None:
    """Raises ValueError if `write_model_card` would replace a README.md that it did not write."""
    path = folder / CARD_NAME
    if path.is_file() and f"- {_TAGS[-1]}\n" not in path.read_text(encoding="utf-8"):
        raise ValueError(
            f"--out {folder} holds a {CARD_NAME} that is not ours: choose another folder"
        )


def _samples(folder: Path, run: RunFolder, step: int) -> list[Row]:
    """Copies the first held-out pictures of a step beside the card; returns its `widget`."""
    stem = run.samples_stem(step)
    if (texts := stem.with_suffix(".jsonl")).is_file():
        rows = [parse_mapping(line) for line in texts.read_text(encoding="utf-8").splitlines()]
        return [
            {"text": row["prompt"], "output": {"text": row["completion"]}}
            for row in rows[:NUM_FOLLOWED]
        ]
    grid = stem.with_suffix(".png")
    tiles = read_grid(grid)[:NUM_FOLLOWED] if grid.is_file() else []
    widget = []
    for number, tile in enumerate(tiles):
        url = f"{PICTURES}/{number}.png"
        write_atomic(folder / url, png_bytes(tile.image))
        widget.append({"text": tile.prompt, "output": {"url": url}})
    return widget


def _metadata(config: Config, widget: list[Row]) -> str:
    makes = "text-to-image" if config.rollout.pipeline.num_frames is None else "text-to-video"
    is_text = config.model.kind == "causal_lm"
    data = ModelCardData(
        base_model=config.model.hub_id(),
        base_model_relation=None if config.model.hub_id() is None else "adapter",
        library_name="peft" if is_text else "diffusers",
        pipeline_tag="text-generation" if is_text else makes,
        tags=[*_TAGS] if is_text else [*_TAGS, "flow-matching"],
        widget=widget or None,
    )
    return data.to_yaml().strip()


def _versions(run_dir: Path) -> str:
    with blaming(RunFolder(run_dir).environment):
        packages = environment(run_dir).get("packages", {})
        if not packages:
            return ""
        libraries = ("torch", "diffusers", "transformers", "peft")
        named = [f"{name} {packages[name]}" for name in libraries if name in packages]
        return f" {packages.get('flowgrpo-rc', '')} ({', '.join(named)})"


def _scores(
    rows: Sequence[Row], step: int
) -> tuple[Sequence[str], Sequence[Sequence[str]], int | None]:
    """Returns names and rows of the table of held-out scores, and the last step that has some."""
    evaluations = [row for row in rows if row.get("val/reward") is not None and row["step"] <= step]
    if not evaluations:
        return (), (), None
    first = evaluations[0]
    last = evaluations[-1]
    names = [name for name in last if name.startswith("val/") and last[name] is not None]
    names.sort(key=lambda name: (name != "val/reward", name))
    before = "before" if first["step"] == 0 else f"step {first['step']}"
    columns = {before: first, f"after step {last['step']}": last}
    if first is last:
        columns = {f"step {first['step']}": first}

    def score(value: float | None) -> str:
        return "not finite" if value is None else f"{value:.4f}"

    table = [
        (name.removeprefix("val/"), *(score(row.get(name)) for row in columns.values()))
        for name in names
    ]
    return ("score", *columns), table, last["step"]


def _suites(run_dir: Path) -> list[list[str]]:
    """Returns name, protocol, scores and change of each suite that the run was asked."""
    rows = []
    for result in read_suite_results(RunFolder(run_dir).suites):
        base, tuned, change, _ = result.comparisons["reward"]
        scores = [f"{base.mean:.4f}", f"{tuned.mean:.4f}", f"{change.mean:+.4f}"]
        rows.append([result.name, result.protocol.told(), *scores])
    return rows


def _measured(rows: Sequence[Row]) -> list[tuple[str, str, str]]:
    """Returns title, mean and largest value of what the run measured of the mismatch."""
    columns = {title: known(points_of(rows, name)) for title, name in _MEASURED}
    return [
        (title, f"{fmean(values):.3g}", f"{max(values):.3g}")
        for title, values in columns.items()
        if values
    ]
