"""The model card of an exported LoRA: a README.md with the Hub's metadata and what was measured.

It is a function of the run's folder. Paths, hosts and secrets of the training machine stay out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import ModelCard, ModelCardData
from jinja2 import Environment, StrictUndefined
from torch import Tensor

from flowgrpo_rc.correction.config import RolloutCorrectionConfig
from flowgrpo_rc.evaluation.held_out import NUM_FOLLOWED
from flowgrpo_rc.exports.lora import export_lora
from flowgrpo_rc.files import write_atomic
from flowgrpo_rc.losses.base import ForwardLoss
from flowgrpo_rc.models.lora_files import EXPORT_NAMES
from flowgrpo_rc.models.networks import others_in
from flowgrpo_rc.reading import blaming, parse_mapping, read_mapping
from flowgrpo_rc.records.metrics_file import MetricsFile
from flowgrpo_rc.records.run_folder import RunFolder
from flowgrpo_rc.records.samples import png_bytes, read_grid
from flowgrpo_rc.records.suite_files import read_suite_results
from flowgrpo_rc.redaction import redact
from flowgrpo_rc.report.charts import known
from flowgrpo_rc.report.series import Row, points_of

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


def _noise_levels(config: Config) -> int:
    """Returns at how many noise levels a finished sample is trained."""
    loss = config.actor.diffusion_loss.loss()
    assert isinstance(loss, ForwardLoss)
    return config.rollout.evaluations() if loss.times is None else loss.times


def export_with_card(
    config: Config, run_dir: Path, step: int, tensors: Mapping[str, Tensor], into: Path, **card: Any
) -> Path:
    """Writes a LoRA and its card, which gets `card` as well; returns the file with the tensors."""
    written = export_lora(tensors, config.model, into)
    write_model_card(into, run_dir, config, step=step, others=others_in(tensors), **card)
    return written


def write_model_card(
    folder: Path,
    run_dir: Path,
    config: Config,
    *,
    step: int,
    raw: bool = False,
    source: str | None = None,
    subfolder: str = "",
    others: Sequence[str] = (),
) -> Path:
    """Writes `README.md` into the folder of a LoRA and returns its path.

    `raw`: the last weights, not their average, which evaluations score. Users load from `subfolder`
    of the repository `source`, if there is one; `others` are transformers beside the first, whose
    LoRAs lie in folders with their names.
    """
    rows = MetricsFile(run_dir / "metrics.jsonl").numbers()
    names, scores, evaluated = _scores(rows, step)
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
        pictures=[one["output"]["url"] for one in widget if "url" in one["output"]],
        hub_id=config.model.hub_id(),
        base=base,
        place=config.model.hub_id() or f"path/to/{base}",
        source=source or "path/to/this/folder",
        subfolder=subfolder if source else "",
        others=others,
        weight_name=EXPORT_NAMES["diffusion"],
        versions=_versions(run_dir),
        step=step,
        raw=raw,
        score_names=names,
        scores=scores,
        evaluated=evaluated,
        # They were asked of the run's last weights, averaged.
        suites=[] if raw or not rows or rows[-1]["step"] != step else _suites(run_dir),
        correction=correction,
        # Asked for finished samples alone: it imports the loss that the settings name.
        noise_levels=partial(_noise_levels, config),
        correction_set=[
            (key, value)
            for key, value in asdict(correction).items()
            if value != _DEFAULTS[key] and key != "bypass_mode"
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


def _samples(folder: Path, run: RunFolder, step: int) -> list[dict[str, Any]]:
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


def _metadata(config: Config, widget: list[dict[str, Any]]) -> str:
    makes = "text-to-image" if config.rollout.pipeline.num_frames is None else "text-to-video"
    library, task, tags = "diffusers", makes, [*_TAGS, "flow-matching"]
    if config.model.kind == "causal_lm":
        library, task, tags = "peft", "text-generation", [*_TAGS]
    data = ModelCardData(
        base_model=config.model.hub_id(),
        base_model_relation=None if config.model.hub_id() is None else "adapter",
        library_name=library,
        pipeline_tag=task,
        tags=tags,
        widget=widget or None,
    )
    return data.to_yaml().strip()


def _versions(run_dir: Path) -> str:
    path = run_dir / "environment.json"
    if not path.is_file():
        return ""
    with blaming(path):
        packages = read_mapping(path).get("packages", {})
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
    first, last = evaluations[0], evaluations[-1]
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
    found = []
    for result in read_suite_results(RunFolder(run_dir).suites):
        base, tuned, change, _ = result.comparisons["reward"]
        scores = [f"{base.mean:.4f}", f"{tuned.mean:.4f}", f"{change.mean:+.4f}"]
        found.append([result.name, result.protocol.told(), *scores])
    return found


def _measured(rows: Sequence[Row]) -> list[tuple[str, str, str]]:
    """Returns title, mean and largest value of what the run measured of the mismatch."""
    found = []
    for title, name in _MEASURED:
        values = known(points_of(rows, name))
        if values:
            found.append((title, f"{sum(values) / len(values):.3g}", f"{max(values):.3g}"))
    return found
