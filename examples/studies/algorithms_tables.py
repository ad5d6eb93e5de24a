"""The tables of docs/evidence.md that compare other algorithms, and few bits, with FlowGRPO."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping

from algorithms import ARMS, FULL, QUANTIZED, ROLLOUT, STUDY
from cells import Cell
from estimates import NOTHING, Estimate, Runs, after, by_cell, difference, estimate
from tables import markdown

__all__ = ["CLAIMS", "ENTRIES", "STUDY"]


def runs_of(cells: Mapping[str, Cell], arm: str, rollout: str = ROLLOUT) -> Runs:
    """Returns the runs of an arm by seed."""
    return by_cell(cells, (rollout,), (arm,)).get((rollout, arm), {})


def rewards(cells: Mapping[str, Cell]) -> str:
    """Makes the table of rewards after training."""
    flow_grpo = runs_of(cells, "flow_grpo")
    rows = []
    for arm in ARMS:
        runs = runs_of(cells, arm)
        gap = None if arm == "flow_grpo" else difference(runs, flow_grpo)
        compared = NOTHING if gap is None else gap.signed
        rows.append([f"`{arm}`", *_of(runs), compared, _cost(runs, flow_grpo)])
    gap_name = "against `flow_grpo`, seed by seed"
    header = ["arm", "seeds", "reward after", "exact match", gap_name, "CPU time"]
    return markdown(header, rows)


def _cost(runs: Runs, reference: Runs) -> str:
    """Formats the median ratio of CPU seconds, seed by seed."""
    ratios = [
        runs[seed]["cpu_seconds"] / reference[seed]["cpu_seconds"]
        for seed in runs.keys() & reference.keys()
    ]
    return f"{statistics.median(ratios):.2f}" if ratios else NOTHING


def _of(runs: Runs) -> list[str]:
    """Returns seeds, reward and share of exact matches of an arm."""
    exact = estimate([run["exact_after"] for run in runs.values()])
    return [", ".join(map(str, runs)), str(after(runs)), str(exact)]


def quantized(cells: Mapping[str, Cell]) -> str:
    """Makes the table of runs with frozen weights in few bits."""
    rows = []
    for arm in QUANTIZED:
        runs = runs_of(cells, arm)
        before = f"{next(iter(runs.values()))['before']:.3f}"
        gaps = [_less(cells, arm, rollout).signed for rollout in (ROLLOUT, FULL)]
        rows.append([f"`{arm}`", before, str(after(runs)), *gaps])
    header = ["arm", "reward before", "after", "less fp32", "on the full weights"]
    return markdown(header, rows)


def _less(cells: Mapping[str, Cell], arm: str, rollout: str) -> Estimate:
    found = difference(runs_of(cells, arm, rollout), runs_of(cells, "flow_grpo"))
    assert found is not None
    return found


def nft_gap(cells: Mapping[str, Cell]) -> Estimate | None:
    """Compares DiffusionNFT with FlowGRPO, seed by seed."""
    return difference(runs_of(cells, "diffusion_nft"), runs_of(cells, "flow_grpo"))


def nft_is_level(cells: Mapping[str, Cell]) -> bool:
    """Says whether the interval of their difference holds zero, over five seeds."""
    gap = nft_gap(cells)
    return gap is not None and gap.count == 5 and abs(gap.mean) <= gap.half


ENTRIES: dict[str, Callable[[Mapping[str, Cell]], str]] = {
    "algorithms_rewards": rewards,
    "quantized": quantized,
    "algorithms_nft": lambda cells: str(gap.signed) if (gap := nft_gap(cells)) else NOTHING,
}
CLAIMS: dict[str, Callable[[Mapping[str, Cell]], bool]] = {
    "algorithms_nft_is_level": nft_is_level,
    "quantized_is_level": lambda cells: all(
        abs(gap.mean) <= gap.half
        for arm in QUANTIZED
        for gap in (_less(cells, arm, ROLLOUT), _less(cells, arm, FULL))
    ),
    "quantized_int4_is_lower": lambda cells: all(
        run["after"] < runs_of(cells, "flow_grpo")[seed]["after"]
        for seed, run in runs_of(cells, "int4_weights").items()
    ),
}
