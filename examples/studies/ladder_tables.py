"""The tables, numbers and conclusions of docs/evidence.md that come from the ladder of rollouts.

Differences are to exact rollouts (`REFERENCE`), taken seed by seed, each with the standard error of
its own seeds. Many comparisons are made, and some of them exceed two errors by chance: one counts
if it does after Holm's correction for the number of its kind.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

from cells import Cell
from estimates import NOTHING, Estimate, by_cell, collapsed, difference, estimate
from ladder import ARMS, CLIMBERS, REFERENCE, ROLLOUTS, RUNGS, STUDY
from tables import markdown

__all__ = ["CLAIMS", "ENTRIES", "STUDY"]

LEVEL = 0.05  # how often one of all comparisons of a kind may count by chance
CORRECTIONS = tuple(arm for arm in CLIMBERS if arm != "recipe")
NEW = ("int4", "bits3", "bits2", "reuse", "skip")  # rollouts of the newest weights, from int4 on
OLD = ("int4_old8", "int4_old16")
FINE = ("bf16", "int8", "int4", "bits3")  # rollouts on which every correction trains
COLLAPSED = 0.1  # a mean reward below this is that of no word at all
LEARNED = 0.55  # one below this is that of the base model, 0.527
CLOSE = 0.02  # rewards that differ by less count as level


def grouped(cells: Mapping[str, Cell]) -> dict[tuple[str, str], dict[int, Cell]]:
    """Sorts runs by (rollout, arm) and by seed, in the order of the ladder."""
    return by_cell(cells, tuple(ROLLOUTS), tuple(ARMS))


def against(
    cells: Mapping[str, Cell], rollout: str, arm: str, to: tuple[str, str] = REFERENCE
) -> Estimate | None:
    """Compares the rewards of two cells after training.

    Args:
      cells: name -> content of a run's file.
      rollout: the rollout of one cell.
      arm: its arm.
      to: (rollout, arm) of the other cell.

    Returns:
      The difference, or None without a common seed.
    """
    found = grouped(cells)
    return difference(found.get((rollout, arm), {}), found.get(to, {}))


def over(
    cells: Mapping[str, Cell], pairs: Sequence[tuple[tuple[str, str], tuple[str, str]]]
) -> Estimate | None:
    """Averages differences between cells over pairs of them, seed by seed.

    Args:
      cells: name -> content of a run's file.
      pairs: (rollout, arm) of a cell, and of the one that it is compared with.

    Returns:
      The mean over pairs and seeds, with the spread of the seeds; None without a common seed.
    """
    found = grouped(cells)
    sides = [(found.get(one, {}), found.get(other, {})) for one, other in pairs]
    seeds = set.intersection(*(runs.keys() & to.keys() for runs, to in sides))
    means = [
        statistics.mean(runs[seed]["after"] - to[seed]["after"] for runs, to in sides)
        for seed in sorted(seeds)
    ]
    return estimate(means) if means else None


def behind(found: Mapping[str, Estimate]) -> set[str]:
    """Returns the differences below 0 that are no chance among so many (Holm's correction)."""
    rising = sorted(found, key=lambda name: found[name].chance)
    sure = set()
    for number, name in enumerate(rising):
        if found[name].chance > LEVEL / (len(found) - number):
            break
        sure.add(name)
    return {name for name in sure if found[name].mean < 0}


def families(cells: Mapping[str, Cell]) -> Iterable[dict[str, Estimate]]:
    """Yields the differences to exact rollouts of each kind, by "rollout arm".

    The cells of the corrections are one kind, those of the recipe another, and the means of all
    corrections on a rollout a third.
    """
    for arms in (CORRECTIONS, ("recipe",)):
        found = {f"{on} {arm}": against(cells, on, arm) for on in RUNGS for arm in arms}
        yield {name: one for name, one in found.items() if one is not None}
    all_arms = {on: over(cells, [((on, arm), REFERENCE) for arm in CORRECTIONS]) for on in RUNGS}
    yield {f"{on} {ALL}": one for on, one in all_arms.items() if one is not None}


ALL = "all four"


def mismatch(cells: Mapping[str, Cell], rollout: str) -> float | None:
    """Computes the mean |log-ratio| of the recomputed policy to a rollout, over all iterations.

    Args:
      cells: name -> content of a run's file.
      rollout: the rollout.

    Returns:
      The mean, or None without a run that recomputes.
    """
    runs = grouped(cells).get((rollout, "recomputed"), {})
    values = [value for run in runs.values() for value in run["curves"]["mismatch"]]
    return statistics.mean(values) if values else None


def rewards(cells: Mapping[str, Cell]) -> str:
    """Makes the table of rewards after training: a row for each rollout, a column for each arm."""
    found: dict[str, Estimate] = {}
    sure: set[str] = set()
    for family in families(cells):
        found |= family
        sure |= behind(family)
    fell = {f"{on} {arm}": collapsed(runs) for (on, arm), runs in grouped(cells).items()}
    columns = (*CORRECTIONS, ALL, "recipe")
    rows: list[list[str]] = []
    for rollout in RUNGS:
        size = mismatch(cells, rollout)
        row = [f"`{rollout}`", NOTHING if size is None else f"{size:.1e}"]
        names = [f"{rollout} {arm}" for arm in columns]
        rows.append([*row, *(_written(found, sure, fell, name) for name in names)])
    costs = [NOTHING if arm == ALL else cost(cells, arm) for arm in columns]
    rows.append(["CPU time of a run", "", *costs])
    heads = [arm if arm == ALL else f"`{arm}`" for arm in columns]
    return markdown(["rollout", "mismatch", *heads], rows)


def _written(
    found: Mapping[str, Estimate], sure: set[str], fell: Mapping[str, int], name: str
) -> str:
    if name not in found:
        return NOTHING
    one = found[name]
    text = f"{one.mean:+.3f}" if one.count == 1 else f"{one.mean:+.3f} ± {one.error:.3f}"
    bold = f"**{text}**" if name in sure else text
    return f"{bold}, {fell[name]} fell" if fell.get(name) else bold


def cost(cells: Mapping[str, Cell], arm: str) -> str:
    """Formats the CPU seconds of an arm's runs, divided by those of `centered`.

    The rollouts have different costs, so each is compared with itself; the median is taken.
    """
    ratios: list[float] = []
    for rollout in RUNGS:
        own, base = (grouped(cells).get((rollout, one), {}) for one in (arm, "centered"))
        seeds = own.keys() & base.keys()
        ratios += [own[seed]["cpu_seconds"] / base[seed]["cpu_seconds"] for seed in seeds]
    return f"{statistics.median(ratios):.2f}" if ratios else NOTHING


def seeds(cells: Mapping[str, Cell]) -> str:
    """Formats the smallest and the largest number of seeds of a cell."""
    found = grouped(cells)
    counts = {len(found.get((rollout, arm), {})) for rollout in RUNGS for arm in CLIMBERS}
    return str(min(counts)) if len(counts) == 1 else f"{min(counts)} to {max(counts)}"


def reference(cells: Mapping[str, Cell]) -> str:
    """Formats the mean reward after training on exact rollouts."""
    return f"{statistics.mean(run['after'] for run in grouped(cells)[REFERENCE].values()):.3f}"


def _mean(cells: Mapping[str, Cell], rollout: str, arm: str) -> float:
    return statistics.mean(run["after"] for run in grouped(cells)[rollout, arm].values())


def _start(cells: Mapping[str, Cell], rollout: str) -> str:
    """Formats the reward of a rollout's first images, which the arm has no part in."""
    runs = grouped(cells)[rollout, "centered"].values()
    return f"{statistics.mean(run['curves']['reward'][0] for run in runs):.2f}"


def _less(arm: str, other: str) -> Callable[[Mapping[str, Cell]], Estimate]:
    """Makes a comparison of two arms over all rollouts, seed by seed."""

    def compared(cells: Mapping[str, Cell]) -> Estimate:
        found = over(cells, [((rollout, arm), (rollout, other)) for rollout in RUNGS])
        assert found is not None
        return found

    return compared


def _behind(cells: Mapping[str, Cell], arm: str) -> set[str]:
    """Returns the rollouts on which an arm, or the mean of all, is behind beyond chance."""
    sure = set().union(*map(behind, families(cells)))
    return {rollout for rollout in RUNGS if f"{rollout} {arm}" in sure}


def _fell(cells: Mapping[str, Cell], rollout: str) -> dict[str, int]:
    """Counts the collapsed runs of each correction on a rollout."""
    return {arm: collapsed(grouped(cells)[rollout, arm]) for arm in CORRECTIONS}


def _each(cells: Mapping[str, Cell], rollouts: Sequence[str]) -> list[Estimate]:
    found = [against(cells, rollout, arm) for rollout in rollouts for arm in CORRECTIONS]
    return [one for one in found if one is not None]


def _widest(cells: Mapping[str, Cell]) -> str:
    deviations = [one.error * one.count**0.5 for one in _each(cells, RUNGS)]
    return f"{min(deviations):.3f} to {max(deviations):.3f}"


def _best_on_old(cells: Mapping[str, Cell]) -> bool:
    gaps = dict(zip(CORRECTIONS, _each(cells, ("int4_old16",)), strict=True))
    fell = _fell(cells, "int4_old16")
    return (
        max(gaps, key=lambda arm: gaps[arm].mean) == "recomputed"
        and (fell["centered"], fell["guard"], fell["recomputed"]) == (1, 1, 0)
        and not any(_behind(cells, arm) & {"int4_old16"} for arm in CORRECTIONS)
    )


ENTRIES: dict[str, Callable[[Mapping[str, Cell]], str]] = {
    "ladder_runs": lambda cells: str(
        sum(
            len(runs)
            for (on, arm), runs in grouped(cells).items()
            if on in RUNGS and arm in CLIMBERS
        )
    ),
    "ladder_seeds": seeds,
    "ladder_deviations": _widest,
    "ladder_reference": reference,
    "ladder_rewards": rewards,
    "ladder_bf16_start": lambda cells: _start(cells, "bf16"),
    "ladder_bits2_start": lambda cells: _start(cells, "bits2"),
    "ladder_skip_start": lambda cells: _start(cells, "skip"),
    "ladder_less_recomputed": lambda cells: _less("centered", "recomputed")(cells).signed,
    "ladder_less_guard": lambda cells: _less("centered", "guard")(cells).signed,
}
CLAIMS: dict[str, Callable[[Mapping[str, Cell]], bool]] = {
    "ladder_recipe_fails": lambda cells: all(
        _mean(cells, rollout, "recipe") < (COLLAPSED if rollout in NEW else LEARNED)
        for rollout in (*NEW, *OLD)
    ),
    "ladder_recipe_is_behind": lambda cells: _behind(cells, "recipe") == {*RUNGS},
    "ladder_corrections_hold": lambda cells: (
        all(one.mean > -CLOSE for one in _each(cells, FINE))
        and not any(sum(_fell(cells, rollout).values()) for rollout in FINE)
        and not any(_behind(cells, arm) & {*FINE} for arm in (*CORRECTIONS, ALL))
    ),
    "ladder_too_far": lambda cells: _behind(cells, ALL) == {"bits2", "skip"},
    "ladder_one_cell": lambda cells: (
        {arm: on for arm in CORRECTIONS if (on := _behind(cells, arm))}
        == {"centered_recomputed": {"bits2"}}
    ),
    "ladder_old_weights": _best_on_old,
    "ladder_centered_is_cheap": lambda cells: all(
        float(cost(cells, arm)) >= 0.98 for arm in CORRECTIONS
    ),
    "ladder_no_arm_leads": lambda cells: all(
        abs(found.mean) < found.half
        for one in CORRECTIONS
        for other in CORRECTIONS
        if one != other
        for found in [_less(one, other)(cells)]
    ),
    "ladder_int8_is_open": lambda cells: (
        (found := against(cells, "int8", "centered")) is not None
        and found.mean + found.half < 0
        and "int8" not in _behind(cells, "centered")
    ),
}
