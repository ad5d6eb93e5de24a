"""A run's folder as one HTML page that needs nothing else.

The page is a function of the folder's files alone: no clock, no network, the same bytes each time.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import yaml

from flowgrpo_rc.files import write_atomic
from flowgrpo_rc.records.best import BestEvaluation
from flowgrpo_rc.records.metrics_file import Row
from flowgrpo_rc.report import correction, folder, suites
from flowgrpo_rc.report.charts import Chart, Series, known, merged, smoothed
from flowgrpo_rc.report.facts import facts
from flowgrpo_rc.report.page import render
from flowgrpo_rc.report.series import charts_of, distinct, ends, names_below, phases, points_of

# Title, its word, note, thresholds, the metrics drawn.
_UPDATE = """
Policy loss | | | | actor/pg_loss
Clipped fraction | clip | a clip of auto:k is none where it is not warm yet | \
    | actor/clip_fraction actor/clip_fraction_higher actor/clip_fraction_lower \
    actor/auto_bound_warm_fraction
Standard deviation of the ratio | clip | | | actor/ratio_std
KL to the reference | reference | | | actor/kl_loss
Gradient norm | | | | actor/grad_norm
Learning rate | | | | actor/lr
"""
_RESPONSES = """
Response length, tokens | | | | response/length_mean response/length_max
Responses cut at the limit, or empty | | | | response/limit_fraction response/empty_fraction
"""
_NO_FAILURE = {"val/failed_fraction": (0.0, 0.0)}  # values that need no tile


def write_report(run_dir: Path) -> Path:
    """Writes `report.html` into a run's folder, finished or not, and returns its path."""
    path = run_dir / "report.html"
    write_atomic(path, report_page(run_dir).encode())
    return path


def report_page(run_dir: Path, *, live: bool = False) -> str:
    """Returns the page of a run's folder, `live` as in `render`; ValueError if it has no rows."""
    rows = folder.metrics(run_dir)
    config = folder.config(run_dir)
    environment = folder.environment(run_dir)
    headline, progress = outcome(rows, folder.setting(config, "trainer.total_training_steps"))
    reward, rewards = _rewards(rows)
    return render(
        "run.html",
        live=live,
        title=folder.title(run_dir, config),
        outcome=headline,
        progress=progress,
        facts=facts(run_dir),
        tiles=tiles(rows),
        samples=folder.first_and_last_samples(run_dir),
        strip=folder.samples_over_time(run_dir),
        reward=reward,
        rewards=rewards,
        suites=suites.results(run_dir),
        suite_charts=suites.curves(rows, folder.setting(environment, "suites") or {}),
        health=folder.health(run_dir),
        correction=correction.curves(rows),
        timesteps=correction.timesteps(rows),
        rejected=correction.rejected(run_dir, rows),
        update=charts_of(_UPDATE, rows),
        timing=_timing(rows),
        config=yaml.safe_dump(config, sort_keys=False, allow_unicode=True) if config else "",
        environment=folder.leaves(environment) if environment else [],
        checkpoints=folder.checkpoints(run_dir),
    )


def outcome(rows: Sequence[Row], total_steps: int | None) -> tuple[str, str]:
    """Returns the held-out reward before and after training, and the steps, as sentences."""
    steps = rows[-1]["step"] if rows else 0
    progress = f"Training steps: {steps}"
    if total_steps not in (None, steps):
        progress += f" of {total_steps}"
    evaluations = known(points_of(rows, "val/reward"))
    if len(evaluations) > 1:
        sentence = f"Held-out reward {_change(evaluations[0], evaluations[-1])}"
        best = BestEvaluation(rows)
        if best.worse and best.step is not None:
            sentence += f"; best {best.reward:.4f} at step {best.step}"
        return sentence, progress
    sentence = "Not evaluated yet"
    if evaluations:
        sentence = f"Held-out reward {evaluations[0]:.4f}, evaluated once"
    trained = ends(rows, "reward/mean")
    if trained:
        sentence += f"; training reward {_change(*trained)}"
    return sentence, progress


def _change(first: float, last: float) -> str:
    return f"{first:.4f} \u2192 {last:.4f} ({last - first:+.4f})"


def tiles(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Returns the numbers to be seen first: names and values, before and after training."""
    pairs = []
    for name in distinct(rows, "val/", "val/reward"):
        pair = ends(rows, name)
        if pair is not None and name != "val/std" and pair != _NO_FAILURE.get(name):
            first, last = pair
            text = f"{first:.3f} \u2192 {last:.3f}" if first != last else f"{last:.3f}"
            pairs.append((f"held-out {name.removeprefix('val/')}", text))
    if speeds := known(points_of(rows, "perf/samples_per_second")):
        pairs.append(("training samples per second", f"{fmean(speeds):.1f}"))
    if memory := known(points_of(rows, "perf/peak_memory_gib")):
        pairs.append(("peak memory, GiB", f"{max(memory):.2f}"))
    if seconds := sum(phases(rows).values()):
        pairs.append(("measured time", _duration(seconds)))
    return pairs


def _rewards(rows: Sequence[Row]) -> tuple[Chart, list[Chart]]:
    training = Series(name="training", points=points_of(rows, "reward/mean"))
    held_out = Series(name="held-out", points=points_of(rows, "val/reward"), color=1)
    lines = [*smoothed(training, color=0), held_out]
    charts = []
    _, *names = distinct(rows, "reward/", "reward/mean")
    same = [name for name in names_below(rows, "reward/") if name not in ("reward/mean", *names)]
    note = f"the numbers of training are those of {', '.join(same)}, too" if same else ""
    mean = Chart(title="Mean reward", series=lines, note=note, word="reward")
    for name in names:
        line = Series(name="training", points=points_of(rows, name))
        charts.append(Chart(title=name, series=smoothed(line, color=0)))
    return mean, merged(charts) + charts_of(_RESPONSES, rows)


def _timing(rows: Sequence[Row]) -> list[tuple[str, float, str]]:
    """Returns name, share of the run, and duration of each phase, the longest first."""
    durations = sorted(phases(rows).items(), key=lambda phase: -phase[1])
    total = sum(seconds for _, seconds in durations)
    return [
        (name, seconds / total, f"{_duration(seconds)}, {seconds / total:.0%}")
        for name, seconds in durations
        if total
    ]


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
