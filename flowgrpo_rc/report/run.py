"""A run's folder as one HTML page that needs nothing else.

The page is a function of the folder's files alone: no clock, no network, the same bytes each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flowgrpo_rc.files import write_atomic
from flowgrpo_rc.reading import blaming
from flowgrpo_rc.report import correction, html, suites
from flowgrpo_rc.report import sections as files
from flowgrpo_rc.report.charts import Chart, Series, draw, gallery, smoothed, smoothing
from flowgrpo_rc.report.facts import facts, setting
from flowgrpo_rc.report.series import Row, change, distinct, ends, phases, points_of, series_of
from flowgrpo_rc.report.words import documentation_site, explained

# Chart title, its word, the metrics drawn.
_UPDATE_CHARTS: tuple[tuple[str, str | None, tuple[str, ...]], ...] = (
    ("Policy loss", None, ("actor/pg_loss",)),
    (
        "Clipped fraction",
        "clip",
        ("actor/clip_fraction", "actor/clip_fraction_higher", "actor/clip_fraction_lower"),
    ),
    ("Standard deviation of the ratio", "clip", ("actor/ratio_std",)),
    ("KL to the reference", "reference", ("actor/kl_loss",)),
    ("Gradient norm", None, ("actor/grad_norm",)),
    ("Learning rate", None, ("actor/lr",)),
)
_NO_FAILURE = {"val/failed_fraction": (0.0, 0.0)}  # values that need no tile
_RESPONSE_CHARTS = (
    ("Response length, tokens", ("response/length_mean", "response/length_max")),
    (
        "Responses cut at the limit, or empty",
        ("response/limit_fraction", "response/empty_fraction"),
    ),
)


def write_report(run_dir: Path) -> Path:
    """Writes `report.html` into a run's folder, finished or not, and returns its path.

    Raises:
      ValueError: the folder holds no metrics.jsonl, or a file is damaged.
    """
    rows = files.metrics(run_dir)
    config = files.config(run_dir)
    environment = files.environment(run_dir)
    sections = [
        html.section("samples", "Before and after", _summary(rows) + files.samples(run_dir)),
        html.section("reward", "Reward", _reward(rows)),
        *suites.sections(run_dir, rows),
        html.section("health", "Health warnings", files.health(run_dir)),
        html.section("correction", "Rollout correction by step", correction.curves(rows)),
        html.section(
            "timesteps", "Log-probability difference by timestep", correction.timesteps(rows)
        ),
        html.section("histograms", "Log-ratios and weights", correction.histograms(run_dir, rows)),
        html.section("rejected", "Rejected samples", files.rejected(run_dir, config)),
        html.section("update", "Policy update", _update(rows)),
        html.section("timing", "Time by phase", _timing(rows)),
        html.section("config", "Configuration", files.config_text(config)),
        html.section("environment", "Environment", files.environment_table(environment)),
        html.section("checkpoints", "Checkpoints and weights", files.checkpoints(run_dir)),
    ]
    title = files.title(run_dir, config)
    header = html.header(title, *_outcome(rows, setting(config, "trainer.total_training_steps")))
    with blaming(f"{run_dir}: config.yaml or environment.json"):
        header += html.facts(facts(config, environment, rows))
    words = explained([header, *sections], documentation_site())
    sections.append(html.section("words", "Words", words))
    page = html.page(title, header, sections)
    path = run_dir / "report.html"
    write_atomic(path, page.encode())
    return path


def _outcome(rows: Sequence[Row], total_steps: int | None) -> tuple[str, str]:
    """Returns the result in one sentence, and how far the run came."""
    steps = rows[-1]["step"] if rows else 0
    progress = f"Training steps: {steps}"
    if total_steps not in (None, steps):
        progress += f" of {total_steps}"
    evaluations = [value for _, value in points_of(rows, "val/reward") if value is not None]
    if len(evaluations) > 1:
        return f"Held-out reward {change((evaluations[0], evaluations[-1]))}", progress
    outcome = "Not evaluated yet"
    if evaluations:
        outcome = f"Held-out reward {evaluations[0]:.4f}, evaluated once"
    trained = ends(rows, "reward/mean")
    if trained:
        outcome += f"; training reward {change(trained)}"
    return outcome, progress


def _summary(rows: Sequence[Row]) -> str:
    tiles = []
    for name in distinct(rows, "val/", "val/reward"):
        pair = ends(rows, name)
        if pair is not None and name != "val/std" and pair != _NO_FAILURE.get(name):
            first, last = pair
            text = f"{first:.3f} \u2192 {last:.3f}" if first != last else f"{last:.3f}"
            tiles.append((f"held-out {name.removeprefix('val/')}", text))
    speeds = [value for _, value in points_of(rows, "perf/samples_per_second") if value is not None]
    memory = [value for _, value in points_of(rows, "perf/peak_memory_gib") if value is not None]
    seconds = sum(phases(rows).values()) if rows else 0.0
    if speeds:
        tiles.append(("training samples per second", f"{sum(speeds) / len(speeds):.1f}"))
    if memory:
        tiles.append(("peak memory, GiB", f"{max(memory):.2f}"))
    if seconds:
        tiles.append(("measured time", _duration(seconds)))
    return html.tiles(tiles) if tiles else html.empty("No numbers yet.")


def _reward(rows: Sequence[Row]) -> str:
    training = Series(name="training", points=points_of(rows, "reward/mean"))
    held_out = Series(name="held-out", points=points_of(rows, "val/reward"), color=1)
    lines = [*smoothed(training, color=0), held_out]
    note = smoothing([training])
    mean = Chart(title="Mean reward", series=lines, note=note, word="reward")
    charts = []
    for name in distinct(rows, "reward/", "reward/mean")[1:]:
        line = Series(name=name.rpartition("/")[2], points=points_of(rows, name))
        charts.append(Chart(title=name, series=smoothed(line, color=0)))
    charts += [
        Chart(title=title, series=found)
        for title, keys in _RESPONSE_CHARTS
        if (found := series_of(rows, keys))
    ]
    return html.wide(draw(mean)) + gallery(charts)


def _update(rows: Sequence[Row]) -> str:
    charts = [
        Chart(title=title, series=series, word=word)
        for title, word, names in _UPDATE_CHARTS
        if (series := series_of(rows, names))
    ]
    return gallery(charts) if charts else html.empty("No update yet.")


def _timing(rows: Sequence[Row]) -> str:
    found = sorted(phases(rows).items(), key=lambda phase: -phase[1])
    total = sum(seconds for _, seconds in found)
    if not total:
        return html.empty("No timings yet.")
    bars = [
        (name, seconds, f"{_duration(seconds)}, {seconds / total:.0%}") for name, seconds in found
    ]
    return html.bars(bars)


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
