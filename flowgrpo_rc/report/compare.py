"""Several runs on one HTML page: settings, final numbers, and curves in common axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from flowgrpo_rc.files import write_atomic
from flowgrpo_rc.reading import blaming
from flowgrpo_rc.report import html
from flowgrpo_rc.report import sections as files
from flowgrpo_rc.report.charts import Chart, Series, draw, gallery, shown, smoothed, smoothing
from flowgrpo_rc.report.correction import mean_by_timestep
from flowgrpo_rc.report.facts import facts
from flowgrpo_rc.report.series import (
    Row,
    correction_series,
    distinct,
    ends,
    phases,
    points_of,
    series_of,
)
from flowgrpo_rc.report.words import documentation_site, explained

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
    ("Clipped fraction", "clip", "actor/clip_fraction"),
    ("Gradient norm", None, "actor/grad_norm"),
    ("KL to the reference", "reference", "actor/kl_loss"),
    ("Learning rate", None, "actor/lr"),
)


class ComparedRun(NamedTuple):
    """A run's folder as it was read.

    Attributes:
      name: the experiment's name, or a part of the path that tells the runs apart.
      folder: the folder.
      rows: the rows of metrics.jsonl.
      settings: the keys of config.yaml and their values, without secrets.
      facts: what `facts.facts` says.
    """

    name: str
    folder: Path
    rows: Sequence[Row]
    settings: Mapping[str, str]
    facts: Sequence[tuple[str | None, str, str]]


def write_comparison(folders: Sequence[Path], path: Path) -> Path:
    """Writes a page about two to four runs, finished or not, and returns its path.

    Args:
      folders: the folders of the runs.
      path: the file to write.

    Raises:
      ValueError: there are fewer or more runs, one is given twice, or a folder is not a run's.
    """
    runs = _read(folders)
    between = " and " if len(runs) == 2 else ", "
    names = between.join(run.name for run in runs)
    sections = [
        html.section("numbers", "Final numbers", _numbers(runs)),
        html.section(
            "samples",
            "Samples of the last evaluation",
            files.last_samples([(run.name, run.folder) for run in runs]),
        ),
        html.section("settings", "What differs", _settings(runs)),
        html.section("reward", "Reward", _rewards(runs)),
        html.section("correction", "Rollout correction by step", _correction(runs)),
        html.section("update", "Policy update", _updates(runs)),
        html.section("health", "Health warnings", _health(runs)),
    ]
    folder_names = "; ".join(
        f"{run.name}: {run.rows[-1]['step'] if run.rows else 0} steps" for run in runs
    )
    header = html.header(f"Comparison of {names}", _outcome(runs), folder_names)
    header += html.facts([line for line in runs[0].facts if all(line in run.facts for run in runs)])
    words = explained([header, *sections], documentation_site())
    sections.append(html.section("words", "Words", words))
    page = html.page(f"Comparison of {names}", header, sections)
    path.parent.mkdir(parents=True, exist_ok=True)
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
    settings = [dict(files.flat(config)) for config in configs]
    found = []
    for folder, config, own in zip(folders, configs, rows, strict=True):
        with blaming(f"{folder}: config.yaml or environment.json"):
            found.append(facts(config, files.environment(folder), own))
    return [
        ComparedRun(*columns)
        for columns in zip(titles, folders, rows, settings, found, strict=True)
    ]


def _outcome(runs: Sequence[ComparedRun]) -> str:
    last = [(run.name, ends(run.rows, "val/reward")) for run in runs]
    known = [f"{name} {pair[1]:.4f}" for name, pair in last if pair is not None]
    return f"Last held-out reward: {', '.join(known)}" if known else "No held-out reward yet"


def _numbers(runs: Sequence[ComparedRun]) -> str:
    """Makes a table of held-out scores and other summary numbers, with one column for each run."""
    scores = sorted({name for run in runs for name in distinct(run.rows, "val/", "val/reward")})
    scores.sort(key=lambda name: name != "val/reward")
    rows = [
        (f"held-out {name.removeprefix('val/')}", [_first_last(run, name) for run in runs])
        for name in scores
    ]
    rewards = [_last(points_of(run.rows, "reward/mean")) for run in runs]
    rows.append(("training reward, last step", rewards))
    for title, _, name, _ in _CORRECTION:
        means = [_mean(correction_series(run.rows, (name,))) for run in runs]
        rows.append((f"{title[0].lower()}{title[1:]}, over all steps", means))
    speeds = [_mean(series_of(run.rows, ("perf/samples_per_second",))) for run in runs]
    rows.append(("training samples per second", speeds))
    seconds = [f"{sum(phases(run.rows).values()):.0f}" for run in runs]
    rows.append(("measured time, seconds", seconds))
    shown = [(name, *values) for name, values in rows if set(values) != {_ABSENT}]
    return _caveat(runs) + html.columns(
        ("", *(run.name for run in runs)), shown, kind="columns even"
    )


def _caveat(runs: Sequence[ComparedRun]) -> str:
    """Warns if the runs were not evaluated alike."""
    keys = [key for key, _ in _differences(runs) if key.startswith(_EVALUATION)]
    if not keys:
        return ""
    text = (
        f"The runs were not evaluated alike ({', '.join(keys)}): their held-out numbers say "
        "nothing about each other."
    )
    return html.warnings([("Careful.", text)])


def _differences(runs: Sequence[ComparedRun]) -> list[tuple[str, list[str]]]:
    """Returns the keys whose values differ, with the value of each run."""
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    found = [(key, [run.settings.get(key, _ABSENT) for run in runs]) for key in keys]
    return [(key, values) for key, values in found if len(set(values)) > 1]


def _settings(runs: Sequence[ComparedRun]) -> str:
    rows = [(key, *values) for key, values in _differences(runs) if key not in _NAMES_ONLY]
    recorded = [{name: value for _, name, value in run.facts} for run in runs]
    for name in _NO_SETTINGS:
        values = [facts.get(name, _ABSENT) for facts in recorded]
        if len(set(values)) > 1:
            rows.append((name, *values))
    return (
        html.columns(("", *(run.name for run in runs)), rows, kind="columns even")
        if rows
        else html.empty("None.")
    )


def _rewards(runs: Sequence[ComparedRun]) -> str:
    names: set[str] = set()
    for run in runs:
        names |= set(distinct(run.rows, "val/", "val/reward")[1:])
        names |= set(distinct(run.rows, "reward/", "reward/mean")[1:])
    held_out = _overlay(runs, "Held-out reward", "val/reward", "reward")
    training = _overlay(runs, "Training reward", "reward/mean", "reward")
    others = [
        _overlay(runs, name, name) for name in sorted(names) if not name.endswith("failed_fraction")
    ]
    return html.wide(draw(held_out)) + html.wide(draw(training)) + gallery(others)


def _correction(runs: Sequence[ComparedRun]) -> str:
    charts = []
    for title, word, name, log_y in _CORRECTION:
        series = _each(runs, [correction_series(run.rows, (name,)) for run in runs])
        charts += [Chart(title=title, series=series, log_y=log_y, word=word)] if series else []
    by_timestep = [mean_by_timestep(run.rows) for run in runs]
    if any(by_timestep):
        levels = [
            Series(name=run.name, points=points)
            for run, points in zip(runs, by_timestep, strict=True)
        ]
        by_step = Chart(
            title="Difference by timestep",
            series=levels,
            note="mean over steps",
            x_name="timestep",
            log_y=True,
            word="timestep",
        )
        charts.append(by_step)
    return (
        gallery(charts) if charts else html.empty("The runs report no rollout-correction metrics.")
    )


def _updates(runs: Sequence[ComparedRun]) -> str:
    charts = [
        _overlay(runs, title, name, word)
        for title, word, name in _UPDATE
        if any(points_of(run.rows, name) for run in runs)
    ]
    return gallery(charts) if charts else html.empty("No update yet.")


def _overlay(runs: Sequence[ComparedRun], title: str, name: str, word: str | None = None) -> Chart:
    """Returns a metric of all runs in one chart; training rewards smoothed."""
    lines = [Series(name=run.name, points=points_of(run.rows, name)) for run in runs]
    note = smoothing(lines) if name == "reward/mean" else ""
    if name.startswith("reward/"):
        lines = [part for index, line in enumerate(lines) for part in smoothed(line, index)]
    return Chart(title=title, series=lines, note=note, word=word)


def _each(runs: Sequence[ComparedRun], found: Sequence[Sequence[Series]]) -> list[Series]:
    """Returns the first series of each run under the run's name; [] if no run has one.

    A run without a series gets an empty one, so that the others keep their colours.
    """
    named = zip(runs, found, strict=True)
    lines = [
        Series(name=run.name, points=series[0].points if series else ()) for run, series in named
    ]
    return lines if any(found) else []


def _health(runs: Sequence[ComparedRun]) -> str:
    lists = {run.name: files.health(run.folder) for run in runs}
    if set(lists.values()) == {files.NO_WARNING}:
        return files.NO_WARNING
    return "".join(html.note(name) + warnings for name, warnings in lists.items())


def _first_last(run: ComparedRun, name: str) -> str:
    pair = ends(run.rows, name)
    return _ABSENT if pair is None else f"{pair[0]:.4f} \u2192 {pair[1]:.4f}"


def _last(points: Sequence[tuple[float, float | None]]) -> str:
    values = [value for _, value in points if value is not None]
    return f"{values[-1]:.4f}" if values else _ABSENT


def _mean(series: Sequence[Series]) -> str:
    values = [value for line in series for _, value in line.finite()]
    return shown(float(f"{sum(values) / len(values):.3g}")) if values else _ABSENT
