"""The model card of an exported LoRA: a README.md with the Hub's metadata and what was measured.

It is a function of the run's folder. Paths, hosts and secrets of the training machine stay out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowgrpo_rc.correction.config import RolloutCorrectionConfig
from flowgrpo_rc.files import write_atomic
from flowgrpo_rc.models.lora_files import EXPORT_NAMES
from flowgrpo_rc.reading import blaming, read_mapping
from flowgrpo_rc.records.metrics_file import MetricsFile
from flowgrpo_rc.redaction import redact
from flowgrpo_rc.report.series import Row, points_of, series_of

if TYPE_CHECKING:
    from flowgrpo_rc.config.tree import Config

CARD_NAME = "README.md"
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


def write_model_card(
    folder: Path,
    run_dir: Path,
    config: Config,
    *,
    step: int,
    raw: bool = False,
    source: str = "path/to/this/folder",
    others: Sequence[str] = (),
) -> Path:
    """Writes `README.md` into the folder of a LoRA and returns its path.

    Args:
      folder: folder of the LoRA.
      run_dir: folder of the run that trained it.
      config: configuration of the run.
      step: the step that the weights are from.
      raw: True for the last weights, False for their average, which evaluations score.
      source: the place that users load from.
      others: transformers beside the first, whose LoRAs lie in folders with their names.
    """
    rows = MetricsFile(run_dir / "metrics.jsonl").numbers()
    warnings = MetricsFile(run_dir / "health.jsonl").rows()
    paragraphs = [
        f"# {config.trainer.experiment_name}",
        _introduction(config, run_dir),
        "## Held-out reward",
        _reward(rows, config, step, averaged=config.actor.ema.enable and not raw),
        "## How to load it",
        _usage(config, source, others),
        "## Training",
        _table(("setting", "value"), _settings(config, step)),
        "## Rollout correction",
        _correction(config, rows, warnings),
    ]
    text = redact(f"---\n{_metadata(config)}\n---\n\n" + "\n\n".join(paragraphs) + "\n")
    path = folder / CARD_NAME
    write_atomic(path, text.encode())
    return path


def check_card(folder: Path) -> None:
    """Raises ValueError if `write_model_card` would replace a README.md that it did not write."""
    path = folder / CARD_NAME
    if path.is_file() and f"- {_TAGS[-1]}\n" not in path.read_text(encoding="utf-8"):
        raise ValueError(
            f"--out {folder} holds a {CARD_NAME} that is no model card of ours: choose another "
            "folder"
        )


def _is_text(config: Config) -> bool:
    return config.model.kind == "causal_lm"


def _metadata(config: Config) -> str:
    from huggingface_hub import ModelCardData

    makes = "text-to-image" if config.rollout.pipeline.num_frames is None else "text-to-video"
    data = ModelCardData(
        base_model=config.model.hub_id(),
        base_model_relation=None if config.model.hub_id() is None else "adapter",
        library_name="peft" if _is_text(config) else "diffusers",
        pipeline_tag="text-generation" if _is_text(config) else makes,
        tags=[*_TAGS] if _is_text(config) else [*_TAGS, "flow-matching"],
    )
    return data.to_yaml().strip()


def _introduction(config: Config, run_dir: Path) -> str:
    method = "GRPO" if _is_text(config) else "FlowGRPO"
    base = config.model.hub_id()
    of = (
        f"[{base}](https://huggingface.co/{base})"
        if base
        else f"a local checkpoint, `{Path(config.model.path).name}`"
    )
    return (
        f"A LoRA for {of}, trained with {method} by flowgrpo_rc{_versions(run_dir)}. Everything "
        "below was measured in that run or set for it.\n\nNo licence is declared here: add "
        "`license:` to the header of this file. That of the base model applies as well."
    )


def _versions(run_dir: Path) -> str:
    path = run_dir / "environment.json"
    if not path.is_file():
        return ""
    with blaming(path):
        packages = read_mapping(path).get("packages", {})
        named = [
            f"{name} {packages[name]}"
            for name in ("torch", "diffusers", "transformers", "peft")
            if name in packages
        ]
        return f" {packages.get('flowgrpo-rc', '')} ({', '.join(named)})"


def _reward(rows: Sequence[Row], config: Config, step: int, *, averaged: bool) -> str:
    evaluations = [row for row in rows if row.get("val/reward") is not None and row["step"] <= step]
    if not evaluations:
        return "The run was not evaluated."
    first = evaluations[0]
    last = evaluations[-1]
    names = [name for name in sorted(last) if name.startswith("val/") and last[name] is not None]
    names.sort(key=lambda name: name != "val/reward")
    held_out = config.rollout.val_kwargs
    count = "all" if held_out.n is None else f"at most {held_out.n}"
    if not _is_text(config):
        how = f"{held_out.num_inference_steps} ODE steps"
    elif held_out.temperature:
        how = f"temperature {held_out.temperature:g}"
    else:
        how = "the likeliest answers"
    notes = [f"On {count} prompts of the held-out file, one sample each, {how}, fixed seeds."]
    if first is last:
        columns: tuple[str, ...] = ("score", f"step {first['step']}")
        table = _table(
            columns, [(name.removeprefix("val/"), _number(last[name])) for name in names]
        )
    else:
        columns = (
            "score",
            "before" if first["step"] == 0 else f"step {first['step']}",
            f"after step {last['step']}",
        )
        cells = [
            (name.removeprefix("val/"), _number(first.get(name)), _number(last[name]))
            for name in names
        ]
        table = _table(columns, cells)
    if last["step"] != step:
        notes.append(f"These weights are those of step {step}, which was not evaluated.")
    if not averaged and config.actor.ema.enable:
        notes.append("The scores are those of the averaged weights; this file holds the last ones.")
    return f"{table}\n\n{' '.join(notes)}"


def _usage(config: Config, source: str, others: Sequence[str]) -> str:
    """Returns a program that runs where the base model and this folder are."""
    base = config.model.hub_id() or f"path/to/{Path(config.model.path).name}"
    if _is_text(config):
        return _code(
            "from peft import PeftModel",
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            "",
            f'model = AutoModelForCausalLM.from_pretrained("{base}")',
            f'model = PeftModel.from_pretrained(model, "{source}")',
            f'tokenizer = AutoTokenizer.from_pretrained("{base}")',
        )
    pipeline = config.rollout.pipeline
    held_out = config.rollout.held_out_spec()
    given: dict[str, float | None] = {
        "height": pipeline.height,
        "width": pipeline.width,
        "num_frames": pipeline.num_frames,
        "num_inference_steps": held_out.num_inference_steps,
        "guidance_scale": held_out.guidance_scale,
        "guidance_scale_2": held_out.guidance_scale_2,
        "true_cfg_scale": held_out.true_cfg_scale,
        "max_sequence_length": pipeline.max_sequence_length,
    }
    place = f'"{source}", weight_name="{EXPORT_NAMES["diffusion"]}"'
    options = [f"    {name}={value}," for name, value in given.items() if value is not None]
    makes_video = pipeline.num_frames is not None
    name = "video" if makes_video else "image"
    output = "frames[0]" if makes_video else "images[0]"
    program = _code(
        "from diffusers import DiffusionPipeline",
        "",
        f'pipe = DiffusionPipeline.from_pretrained("{base}")',
        f"pipe.load_lora_weights({place})",
        *(
            f'pipe.load_lora_weights({place}, subfolder="{name}", load_into_{name}=True)'
            for name in others
        ),
        f"{name} = pipe(",
        '    "a prompt",',
        *options,
        f").{output}",
    )
    return f"In stock diffusers, with the sampler of the evaluation:\n\n{program}"


def _settings(config: Config, step: int) -> list[tuple[str, str]]:
    model = config.model
    rollout = config.rollout
    actor = config.actor
    algorithm = config.algorithm
    optim = actor.optim
    per_step = config.data.train_batch_size * rollout.n
    terms = {name: term for name, term in config.reward.terms.items() if term is not None}
    rows = [
        ("steps", f"{step} of {config.trainer.total_training_steps}, each of {per_step} samples"),
        ("samples per prompt", str(rollout.n)),
        (
            "rewards, weight",
            ", ".join(f"{name} {term.get('weight', 1.0):g}" for name, term in terms.items()),
        ),
        ("advantages", algorithm.adv_estimator),
        ("LoRA rank, alpha", f"{model.lora_rank}, {model.lora_alpha}"),
        ("optimizer, learning rate", f"{optim.name}, {optim.lr:g} ({optim.lr_scheduler})"),
        ("averaged weights", f"decay {actor.ema.decay:g}" if actor.ema.enable else "no"),
        ("KL to the base model", f"{actor.kl_loss_coef:g}" if actor.use_kl_loss else "no"),
        ("precision of rollout, of training", f"{rollout.spec().dtype}, {model.dtype}"),
        ("seed", str(config.trainer.seed)),
    ]
    if _is_text(config):
        loss = actor.token_loss
        return [
            *rows,
            ("loss", f"{loss.loss_mode}, clip {loss.clip_ratio_low:g} / {loss.clip_ratio_high:g}"),
        ]
    pipeline = rollout.pipeline
    algo = rollout.algo
    size, first, last = rollout.window()
    if size == 0:
        options = actor.diffusion_loss.options
        told = [f"{name} {value}" for name, value in options.items()]
        return [
            *rows,
            ("loss", ", ".join([actor.diffusion_loss.loss_mode, *told])),
            ("size", f"{pipeline.width} x {pipeline.height}"),
            ("sampler of the rollout", f"the ODE, {pipeline.num_inference_steps} steps"),
            ("noise levels of a sample", str(config.trained_steps())),
        ]
    return [
        *rows,
        (
            "loss",
            f"{actor.diffusion_loss.loss_mode}, clip_ratio {actor.diffusion_loss.clip_ratio}",
        ),
        ("size", f"{pipeline.width} x {pipeline.height}"),
        (
            "sampler of the rollout",
            f"{algo.sde_type}, {pipeline.num_inference_steps} steps, noise {algo.noise_level:g}",
        ),
        ("stochastic steps", f"{size} of the steps {first} to {last - 1}"),
    ]


def _correction(config: Config, rows: Sequence[Row], warnings: Sequence[Mapping[str, Any]]) -> str:
    """Tells what was set and what was measured about the mismatch of rollout and training."""
    correction = config.algorithm.rollout_correction
    mode = (
        "bypass mode: the old policy is the rollout's"
        if correction.corrects_in_loss
        else "decoupled mode: the old policy is the training graph's before each update"
    )
    set_here = {
        key: value
        for key, value in asdict(correction).items()
        if value != _DEFAULTS[key] and key != "bypass_mode"
    }
    words = ", ".join(f"`{key}={value}`" for key, value in set_here.items())
    measured = []
    for title, name in _MEASURED:
        values = [value for line in series_of(rows, (name,)) for value in line.values()]
        if values:
            measured.append((title, f"{sum(values) / len(values):.3g}", f"{max(values):.3g}"))
    text = f"In {mode}{f'; {words}' if words else ''}."
    if measured:
        text += f"\n\n{_table(('measured in each step', 'mean over steps', 'largest'), measured)}"
    else:
        text += " The run has measured no mismatch."
    said = [f"- step {row['step']}: {row['message']}" for row in warnings]
    steps = len(points_of(rows, "reward/mean"))
    if said:
        return text + f"\n\nHealth warnings in {steps} steps:\n\n" + "\n".join(said)
    return text + f"\n\nNo health warning in {steps} steps."


_DEFAULTS = {field.name: field.default for field in fields(RolloutCorrectionConfig)}


def _table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


def _code(*lines: str) -> str:
    return "\n".join(("```python", *lines, "```"))


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"
