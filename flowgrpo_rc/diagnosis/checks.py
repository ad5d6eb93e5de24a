"""What is wrong with the steps of a dump, the most probable cause first.

A cause stands before its consequences: any wrong formula makes a mismatch, and a mismatch fills the
clip band. So the checks have an order, and some are not asked behind others.

Legend: N steps of samples, S steps of the schedule, D elements of a latent; d the log-prob of the
training graph before any update less the rollout's, in Gaussian units. Two policies whose means
differ by delta have d = -q / 2 +- sqrt(q / D), with q = mean_D delta^2 / std^2.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flowgrpo_rc.calibration.noise import SIGMAS, check_moments, check_sharing
from flowgrpo_rc.correction.history import ROBUST
from flowgrpo_rc.diagnosis.dump import Dump
from flowgrpo_rc.diagnosis.formulas import (
    Formula,
    by_step,
    declared,
    explain,
    gaussian,
    noise_level,
)
from flowgrpo_rc.monitoring.expected_mismatch import QUANTIZATIONS
from flowgrpo_rc.monitoring.health_rules import MOST_CLIPPED, MOST_EQUAL
from flowgrpo_rc.monitoring.mismatch import round_up
from flowgrpo_rc.monitoring.noise import ELEMENTS, shared_noise

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
# A network in bf16 makes 2 to 10 times the error of rounding its output once (measured), guidance g
# makes sqrt(g^2 + (g - 1)^2) of it, and a quantization more by its own factor.
NETWORK = 10.0
USUAL_GUIDANCE = 4.5
BEYOND = 3.0  # times the mismatch of most samples, and a sample has other weights
SHARED = 0.5  # covariance of noise beyond what velocities explain, as in `health_rules`
AUTO = 16.0  # k of the default bound, clip_ratio=auto:16
WIDEST = 0.05  # ten times the widest clip of a published recipe for flow models
OFF_CENTRE = 0.05  # mean of a group's advantages, relative to their size


class Finding(NamedTuple):
    """Something that is wrong."""

    cause: str  # a key of remedies.yaml
    evidence: str


class Examination(NamedTuple):
    """What was found in a dump."""

    findings: list[Finding]  # the most probable cause first
    notes: list[str]  # what is no fault, and what cannot be told
    expected: Tensor  # the rollout's log-probs by the formula of the settings, [N]
    difference: Tensor | None  # of old and rollout log-probs as dumped, [N]


def examine(dump: Dump) -> Examination:
    """Looks for all that numbers alone show."""
    notes: list[str] = []
    rollout, old = (dump.tables.get(f"{side}_log_probs") for side in ("rollout", "old"))
    assert rollout is not None
    difference = None if old is None or torch.equal(old, rollout) else old - rollout
    if difference is None:
        notes.append("cannot tell the mismatch: old_log_probs are missing, or a copy of rollout's")
    if dump.means is None:
        notes.append("cannot tell without means whether noise is standard normal")
    squares = None
    if dump.means is not None:
        squares = (dump.end - dump.means).double().square().mean(1)
    ours, theirs, findings = check_formulas(dump, squares, difference)
    findings += check_rounded_numbers(dump)
    told = None  # a mismatch that no wrong formula makes
    if ours is not None:
        if squares is not None:  # the noise's size is known
            stds = (declared(dump)[0].std, ours.std)
            apart = [(squares / std.square()).nanmean().log().abs().item() for std in stds]
            ours = ours._replace(drawn=stds[apart[1] < apart[0]])
        findings += check_noise(dump, ours.drawn)
        if theirs is not None and ours.agrees(theirs):
            findings += check_mismatch(dump, ours, squares, difference, notes)
            told = difference
    findings += check_training(dump) + check_clip(dump, told)
    expected, _ = declared(dump)[0].values(dump.start.shape[1], squares)
    return Examination(findings, notes, expected, difference)


def check_formulas(
    dump: Dump, squares: Tensor | None, difference: Tensor | None
) -> tuple[Formula | None, Formula | None, list[Finding]]:
    """Finds the formula of each side's log-probs, None if unknown, and what is wrong with it."""
    rollout, rights = dump.tables["rollout_log_probs"], declared(dump)
    elements = dump.start.shape[1]
    exact = torch.zeros(len(dump.sigmas) - 1, dtype=torch.float64)
    ours = explain(dump, rollout, squares, exact, rights)
    if ours is None:
        if squares is not None and explain(dump, rollout, None, exact, rights):
            evidence = "the log-probs fit the settings, and not the recorded means"
            return None, None, [Finding("means", evidence)]
        evidence = "the rollout's log-probs fit neither the settings nor a known mistake"
        return None, None, [Finding("formula", evidence)]
    theirs: Formula | None = ours
    if difference is not None:
        values, slope = ours.values(elements)
        if squares is None:  # the rollout's log-probs tell its squared errors
            squares = ours.drawn.square() * (1 + (values - rollout) / slope).clamp(min=0)
        moved = independent(dump, rollout, rollout + difference) * 0.5 / slope
        variance, count = by_step(dump, moved.square())
        spare = elements * variance * (1 + SIGMAS * (2 / count).sqrt())  # q, at most
        theirs = explain(dump, rollout + difference, squares, spare.clamp(max=1.0), rights)
    sides = {"the rollout": ours, "the training graph": theirs}
    if theirs is None:
        evidence = "the training graph's log-probs fit neither the settings nor a known mistake"
        return ours, None, [Finding("formula", evidence)]
    if ours.agrees(theirs):
        sides = {"the dump" if difference is None else "both sides": ours}
        if ours.form == "plain":  # cancels in every ratio
            return ours, theirs, []
    faults = {side: one for side, one in sides.items() if one is not None and one.cause}
    if len(sides) == 2 and not faults:
        faults = {"the rollout": ours._replace(cause="convention")}
    wanted = rights[0].values(elements, squares)[0].nanmean().item()
    findings = []
    for side, formula in faults.items():
        mean = formula.values(elements, squares)[0].nanmean().item()
        evidence = (
            f"the log-probs of {side} are those of {formula.words}: {mean:.4g} in the mean, "
            f"where the settings give {wanted:.4g}"
        )
        findings.append(Finding(formula.cause, evidence))
    return ours, theirs, findings


def independent(dump: Dump, rollout: Tensor, old: Tensor) -> Tensor:
    """Returns what of a step's old log-probs no line through the rollout's explains, in its units.

    A wrong formula changes how a log-prob depends on the noise, and so is such a line.
    """
    ours, theirs = (side - by_step(dump, side)[0][dump.place] for side in (rollout, old))
    line = by_step(dump, ours * theirs)[0] / by_step(dump, ours.square())[0]
    return theirs / line[dump.place] - ours


def check_rounded_numbers(dump: Dump) -> list[Finding]:
    """Looks for rounded timesteps and log-probs."""
    findings = []
    timesteps, sigma = dump.tables.get("timesteps"), noise_level(dump, 0)
    if timesteps is not None:
        wanted = sigma * (1000 if timesteps.max() > 1 else 1)
        apart = (timesteps - wanted).abs().max().item()
        halves = {name: wanted.to(dtype).double() for name, dtype in HALF.items()}
        ways = {"whole numbers": wanted.round(), "whole numbers below": wanted.floor(), **halves}
        near = [way for way, other in ways.items() if torch.allclose(timesteps, other, rtol=2e-6)]
        if apart > 2e-6 * timesteps.max():
            how = f"they are rounded to {near[0]}" if near else "they are of another schedule"
            evidence = f"timesteps and 1000 sigma differ by up to {apart:.3g}: {how}"
            findings.append(Finding("timestep", evidence))
    for name in ("rollout_log_probs", "old_log_probs"):
        values = dump.tables.get(name, sigma)
        for half, dtype in HALF.items():
            if values is not sigma and torch.equal(values, values.to(dtype).double()):
                apart = torch.finfo(dtype).eps * values.abs().mean().item()
                evidence = f"all {name} are numbers of {half}, about {apart:.1g} apart"
                findings.append(Finding("log_probs", evidence))
    return findings[:1]


def check_noise(dump: Dump, std: Tensor) -> list[Finding]:
    """Looks for noise that steps share, and with means for noise that is not standard normal."""
    stride = max(1, dump.start.shape[1] // ELEMENTS)
    rows = (std.view(-1, dump.steps), dump.start[:, ::stride], dump.end[:, ::stride])
    std, start, end = (row.view(len(rows[0]), dump.steps, -1) for row in rows)
    whole = torch.isfinite(std).all(0).squeeze(1)
    slopes, _ = gaussian(dump, (noise_level(dump, 0), noise_level(dump, 1)), **sampler(dump))
    mean = slopes.float().view_as(std) * start
    if dump.means is not None:
        mean = dump.means[:, ::stride].view_as(start)
    noise = ((end - mean) / std.float())[:, whole]
    if dump.means is not None:
        said = [*check_sharing(noise), *check_moments(noise)]
        return [Finding("noise", "; ".join(said))] if said else []
    excess = (noise.square().mean(2) - 1).clamp(min=0)
    shared = shared_noise(noise, excess, len(noise)).item()
    if shared > SHARED:
        evidence = (
            f"steps have noise in common: a covariance of {shared:.2f} beyond the velocities'"
        )
        return [Finding("noise", evidence)]
    return []


def sampler(dump: Dump) -> dict[str, Any]:
    """Returns kind and noise level of the settings."""
    return {"kind": dump.settings["sde_type"], "level": dump.settings["noise_level"]}


def check_mismatch(
    dump: Dump,
    formula: Formula,
    squares: Tensor | None,
    difference: Tensor | None,
    notes: list[str],
) -> list[Finding]:
    """Looks for latents that were rounded behind their log-prob, and for other weights."""
    elements = dump.start.shape[1]
    _, slope = formula.values(elements)
    if difference is None:
        if squares is None:
            return []
        difference = dump.tables["rollout_log_probs"] - formula.values(elements, squares)[0]
    d = difference * 0.5 / slope
    centred = d - by_step(dump, d)[0][dump.place]
    q = elements * centred.square().nanmean().item()
    for name, dtype in HALF.items():
        if not torch.equal(dump.end, dump.end.to(dtype).float()):
            continue
        octave = torch.exp2(torch.frexp(dump.end).exponent.double() - 1)
        spacing = torch.finfo(dtype).eps * octave
        rounding = (spacing.square().mean(1) / 12 / formula.drawn.square()).nanmean().item()
        said = f"all latents are numbers of {name}, which makes log-probs differ by "
        size = math.sqrt(rounding / elements)
        if q > rounding / 4:
            evidence = f"{said}{size:.1g}; they do by {math.sqrt(q / elements):.1g}"
            return [Finding("latents", evidence)]
        notes.append(f"{said}{size:.1g}, had the log-probs not been taken behind the rounding")
    # The square of a normal number has the median 0.455.
    typical = by_step_median(dump, d.square()) / 0.455
    sizes = (d.square() / typical).view(-1, dump.steps).nanmean(1)
    most = BEYOND**2 * (1 + SIGMAS * math.sqrt(2 / dump.steps))
    outside = int((sizes > most).sum())
    if outside > 1:
        evidence = (
            f"the mismatch of {outside} of {len(sizes)} samples is more than {BEYOND:g} times"
        )
        return [Finding("stale", f"{evidence} that of most: other weights sampled them")]
    slopes, _ = gaussian(dump, (noise_level(dump, 0), noise_level(dump, 1)), **sampler(dump))
    target = dump.end if dump.means is None else dump.means
    drift = (target - slopes.float().unsqueeze(1) * dump.start).double().square().mean(1)
    velocity = (drift / formula.drawn.square()).nanmean().item() - (dump.means is None)
    if velocity <= 0:
        return []
    error = math.sqrt(q / velocity)
    guidance = dump.settings.get("guidance_scale", USUAL_GUIDANCE)
    quantization = str(dump.settings.get("rollout_precision", "")).partition("+")[2]
    explained = NETWORK * torch.finfo(torch.bfloat16).eps / math.sqrt(12)
    explained *= math.hypot(guidance, guidance - 1) * QUANTIZATIONS.get(quantization, 1.0)
    if error > explained:
        evidence = (
            f"the velocities of both sides differ by {100 * error:.2g}%; the precision explains up "
            f"to {100 * explained:.2g}% with guidance {guidance:g}. Weights, guidance or prompts differ"
        )
        return [Finding("stale", evidence)]
    return []


def check_training(dump: Dump) -> list[Finding]:
    """Looks for a policy that no update moves, and for advantages that train nothing."""
    new, old = dump.tables.get("new_log_probs"), dump.tables.get("old_log_probs")
    if new is not None and old is not None and torch.equal(new, old):
        return [Finding("lora", f"all {len(new)} ratios are exactly 1 after an update")]
    if dump.advantages is None:
        return []
    values = (
        dump.advantages.double().flatten(1)[:, 0]
        if dump.advantages.ndim > 1
        else dump.advantages.double()
    )
    size = values.square().mean().sqrt().item()
    if size == 0:
        return [Finding("no_signal", "all advantages are 0")]
    off = values.mean().item() / size
    if dump.group is not None:
        _, group, count = dump.group.unique(return_inverse=True, return_counts=True)
        zeros = torch.zeros(len(count), dtype=torch.float64)
        means = zeros.index_add(0, group, values) / count
        spread = zeros.index_add(0, group, (values - means[group]).square()).sqrt()
        equal = (spread <= 1e-6 * size) & (count > 1)
        if equal.double().mean() > MOST_EQUAL:
            evidence = f"{int(equal.sum())} of {len(count)} groups have only one advantage"
            return [Finding("no_signal", evidence)]
        if (count == count[0]).all() and count[0] > 1:
            typical = means.abs().median().item() / size
            if typical > OFF_CENTRE:
                evidence = f"the mean of a group is typically {typical:.2g} of their size, not 0"
                return [Finding("advantages", evidence)]
    if abs(off) * math.sqrt(len(values)) > SIGMAS:
        evidence = f"the mean of all is {off:.2g} of their size, not 0"
        return [Finding("advantages", evidence)]
    return []


def check_clip(dump: Dump, difference: Tensor | None) -> list[Finding]:
    """Compares the clip with the mismatch before any update."""
    clip = dump.settings.get("clip_ratio")
    if clip is None:
        return []
    sizes = torch.zeros(1) if difference is None else torch.expm1(difference).abs()
    fitting = AUTO * ROBUST * sizes.median().item()
    outside = (sizes > clip).double().mean().item()
    if clip > max(WIDEST, fitting):
        nats = clip * dump.start.shape[1]
        evidence = (
            f"clip_ratio={clip:g} lets a sample's log-prob move by {nats:.2g} nats a step, since a "
            "log-prob is the mean over its elements"
        )
        return [Finding("clip_wide", evidence)]
    if outside > MOST_CLIPPED and dump.settings.get("bypass_mode") not in (False, "false"):
        evidence = (
            f"{100 * outside:.0f}% of the ratios are outside clip_ratio={clip:g} before any update, "
            f"which pulls to the rollout's policy; {round_up(fitting, 2):g} is 16 deviations"
        )
        return [Finding("clip_narrow", evidence)]
    return []


def by_step_median(dump: Dump, values: Tensor) -> Tensor:
    """Returns for each step [N] the median over the samples that have it."""
    found = values.clone()
    for place in dump.place.unique():
        found[dump.place == place] = values[dump.place == place].nanmedian()
    return found
