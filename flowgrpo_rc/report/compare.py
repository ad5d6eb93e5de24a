"""Several runs on one HTML page: settings, final numbers, and curves in common axes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from flowgrpo_rc.files import write_atomic
from flowgrpo_rc.records.metrics_file import Row
from flowgrpo_rc.report import folder as files
from flowgrpo_rc.report.charts import Chart, Points, Series, known, merged, shown, smoothed
from flowgrpo_rc.report.correction import mean_by_timestep, timestep_chart
from flowgrpo_rc.report.facts import facts
from flowgrpo_rc.report.page import render
from flowgrpo_rc.report.series import distinct, ends, names_below, phases, points_of
from flowgrpo_rc.rollout.config import SAMPLED

MOST_RUNS = 4  # colours that are told apart
_NAMES_ONLY = ("trainer.output_dir", "trainer.experiment_name", "trainer.project_name")
# Keys whose difference makes the held-out numbers of two runs incomparable.
_EVALUATION = ("data.val_files", "rollout.val_kwargs.", "reward.terms.")
_NO_SETTINGS = ("Started", "Ran on", "Versions")  # facts that config.yaml does not hold
_ABSENT = "\u2014"
# Title, word, metric, whether values may be drawn on a logarithmic axis.
_CORRECTION = (
    ("Mismatch before the first update", "mismatch", "logprob_abs_diff_mean", True),
    ("Policy's own movement", "movement", "policy_drift_abs_mean", True),
    ("Mismatch over what the precisions explain", "mismatch", "mismatch_over_expected", False),
    ("Clipped by noise before any update", "clip", "pre_update_clip_fraction", False),
    ("Fraction of samples rejected", "rejection", "rollout_rs_seq_masked_fraction", False),
    ("Effective sample size", "ess", "rollout_is_eff_sample_size", False),
)
_UPDATE = (
    ("Clipped fraction", "clip", "actor/clip_fraction", False),
    ("Gradient norm", "", "actor/grad_norm", False),
    ("KL to the reference", "reference", "actor/kl_loss", False),
    ("Learning rate", "", "actor/lr", False),
)


class ComparedRun(NamedTuple):
    """A run's folder as it was read, with a name that tells the runs apart."""

    name: str
    folder: Path
    rows: Sequence[Row]
    settings: Mapping[str, str]
    facts: Sequence[tuple[str, str, str]]


def write_comparison(folders: Sequence[Path], path: Path) -> Path:
    """Writes a page about two to four different runs, finished or not, and returns its path."""
    runs = _read(folders)
    names = [run.name for run in runs]
    steps = [f"{run.name}: {run.rows[-1]['step'] if run.rows else 0} steps" for run in runs]
    lines = [Series(name=run.name, points=mean_by_timestep(run.rows)) for run in runs]
    has_timesteps = any(line.points for line in lines)
    by_timestep = [timestep_chart(lines, "mean over steps")] if has_timesteps else []
    page = render(
        "compare.html",
        title=f"Comparison of {(' and ' if len(runs) == 2 else ', ').join(names)}",
        outcome=_outcome(runs),
        progress="; ".join(steps),
        facts=[line for line in runs[0].facts if all(line in run.facts for run in runs)],
        names=names,
        caveat=_caveat(runs),
        numbers=_numbers(runs),
        samples=_samples(runs),
        settings=_settings(runs),
        rewards=_rewards(runs),
        correction=_overlays(runs, _CORRECTION) + by_timestep,
        update=_overlays(runs, _UPDATE),
        health=[(run.name, files.health(run.folder)) for run in runs],
    )
    write_atomic(path, page.encode())
    return path


def _read(folders: Sequence[Path]) -> list[ComparedRun]:
    if not 2 <= len(folders) <= MOST_RUNS:
        raise ValueError(f"compare: give two to {MOST_RUNS} folders of runs, not {len(folders)}")
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise ValueError(f"compare: {', '.join(map(str, folders))} names a run twice")
    rows = [files.metrics(folder) for folder in folders]
    configs = [files.config(folder) for folder in folders]
    titles = [files.title(folder, config) for folder, config in zip(folders, configs, strict=True)]
    # Equal names tell nothing, so the last one or two names of the path take their place.
    for depth in (1, 2):
        if len(set(titles)) < len(titles):
            titles = ["/".join(folder.resolve().parts[-depth:]) for folder in folders]
    runs = []
    for title, folder, config, run_rows in zip(titles, folders, configs, rows, strict=True):
        settings = dict(files.leaves(config))
        runs.append(ComparedRun(title, folder, run_rows, settings, facts(folder)))
    return runs


def _outcome(runs: Sequence[ComparedRun]) -> str:
    last = [(run.name, ends(run.rows, "val/reward")) for run in runs]
    rewards = [f"{name} {pair[1]:.4f}" for name, pair in last if pair is not None]
    return f"Last held-out reward: {', '.join(rewards)}" if rewards else "No held-out reward yet"


def _caveat(runs: Sequence[ComparedRun]) -> str:
    keys = ", ".join(key for key, *_ in _differences([_evaluation(run.settings) for run in runs]))
    caveat = f"The runs were not evaluated alike ({keys}): their held-out numbers say nothing "
    return f"{caveat}about each other." if keys else ""


def _evaluation(settings: Mapping[str, str]) -> dict[str, str]:
    """Returns what held-out numbers follow from; a null takes the value of the training."""
    evaluation = {key: value for key, value in settings.items() if key.startswith(_EVALUATION)}
    for name in SAMPLED:
        key = f"rollout.val_kwargs.{name}"
        training = f"rollout.pipeline.{name}"
        if evaluation.get(key, "None") == "None" and training in settings:
            evaluation[key] = settings[training]
    return evaluation


def _numbers(runs: Sequence[ComparedRun]) -> list[list[str]]:
    scores = sorted({name for run in runs for name in distinct(run.rows, "val/", "val/reward")})
    scores.sort(key=lambda name: name != "val/reward")
    rows = []
    for name in scores:
        pairs = [ends(run.rows, name) for run in runs]
        texts = [f"{pair[0]:.4f} \u2192 {pair[1]:.4f}" if pair else _ABSENT for pair in pairs]
        rows.append([f"held-out {name.removeprefix('val/')}", *texts])
    pairs = [ends(run.rows, "reward/mean") for run in runs]
    rewards = [f"{pair[1]:.4f}" if pair else _ABSENT for pair in pairs]
    rows.append(["training reward, last step", *rewards])
    for title, _, name, _ in _CORRECTION:
        means = [_mean(points_of(run.rows, name)) for run in runs]
        rows.append([f"{title[0].lower()}{title[1:]}, over all steps", *means])
    speeds = [_mean(points_of(run.rows, "perf/samples_per_second")) for run in runs]
    rows.append(["training samples per second", *speeds])
    seconds = [f"{sum(phases(run.rows).values()):.0f}" for run in runs]
    rows.append(["measured time, seconds", *seconds])
    return [row for row in rows if set(row[1:]) != {_ABSENT}]


def _differences(trees: Sequence[Mapping[str, str]]) -> list[list[str]]:
    keys = dict.fromkeys(key for tree in trees for key in tree)
    values = [[key, *(tree.get(key, _ABSENT) for tree in trees)] for key in keys]
    return [row for row in values if len(set(row[1:])) > 1]


def _settings(runs: Sequence[ComparedRun]) -> list[list[str]]:
    starts = [{name: value for _, name, value in run.facts if name in _NO_SETTINGS} for run in runs]
    rows = _differences([run.settings for run in runs])
    return [row for row in rows if row[0] not in _NAMES_ONLY] + _differences(starts)


def _samples(runs: Sequence[ComparedRun]) -> files.Samples:
    """Returns the samples from before training and of each run's last evaluation, if any."""
    before: dict[bytes, tuple[ComparedRun, Path]] = {}  # alike of runs from one model
    grids = []
    tables = []
    for run in runs:
        pictures = files.sample_files(run.folder, "png")
        if pictures[1:] and pictures[0][0] == "Step 0":
            first = pictures[0][1]
            before.setdefault(first.read_bytes(), (run, first))
        grids += [(run.name, path) for _, path in pictures[-1:]]
        if texts := files.sample_files(run.folder, "jsonl"):
            tables += files.side_by_side(texts, run.name)["tables"]
    firsts = []
    for run, path in before.values():
        is_base = run.settings.get("model.lora_path", "None") == "None"
        words = "base model" if is_base else "before training"
        firsts.append((words if len(before) == 1 else f"{run.name}, {words}", path))
    samples = files.side_by_side(firsts + grids) if grids else {}
    return samples | ({"tables": tables} if tables else {})


def _rewards(runs: Sequence[ComparedRun]) -> list[Chart]:
    wholes = {"val/reward": "Held-out reward", "reward/mean": "Training reward"}
    names = {
        name for run in runs for at in ("val/", "reward/") for name in names_below(run.rows, at)
    }
    further_names = [
        name for name in sorted(names - set(wholes)) if not name.endswith("failed_fraction")
    ]
    charts = [_overlay(runs, title, name, word="reward") for name, title in wholes.items()]
    return merged(charts + [_overlay(runs, name, name) for name in further_names])


def _overlays(
    runs: Sequence[ComparedRun], table: Sequence[tuple[str, str, str, bool]]
) -> list[Chart]:
    return [
        _overlay(runs, title, name, word=word, log_y=log_y)
        for title, word, name, log_y in table
        if any(points_of(run.rows, name) for run in runs)
    ]


def _overlay(
    runs: Sequence[ComparedRun], title: str, name: str, *, word: str = "", log_y: bool = False
) -> Chart:
    """Returns a metric of all runs in one chart; training rewards smoothed."""
    # A run without the metric keeps an empty line, so that the others keep their colours.
    lines = [Series(name=run.name, points=points_of(run.rows, name)) for run in runs]
    if name.startswith("reward/"):
        lines = [piece for index, line in enumerate(lines) for piece in smoothed(line, index)]
    return Chart(title=title, series=lines, log_y=log_y, word=word)


def _mean(points: Points) -> str:
    values = known(points)
    return shown(float(f"{fmean(values):.3g}")) if values else _ABSENT
