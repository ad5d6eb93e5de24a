"""Finds what is wrong with dumped steps: (cause, sentence), the most probable cause first.

A cause stands before its consequences: any wrong formula makes a mismatch, and a mismatch fills the
clip band. So the checks have an order, and some are not asked behind others.

Legend: B samples, T steps of each, S steps of the schedule, D elements of a latent; d the log-prob
of the training graph before any update less the rollout's, in Gaussian units. If two policies have
means that differ by delta, d is -q / 2 +- sqrt(q / D), with q = mean_D delta^2 / std^2.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from flowgrpo_rc.calibration.noise import SIGMAS, check_moments, check_sharing
from flowgrpo_rc.correction.history import ROBUST
from flowgrpo_rc.diagnosis.dump import Dump
from flowgrpo_rc.diagnosis.formulas import Formula, by_step, declared, explain, gaussian, sigma
from flowgrpo_rc.monitoring.health_rules import MOST_CLIPPED, MOST_EQUAL
from flowgrpo_rc.monitoring.mismatch import round_up
from flowgrpo_rc.monitoring.noise import ELEMENTS, shared_noise

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
# A network in bf16 makes 2 to 10 times the error of rounding its output once (measured), and
# guidance g makes sqrt(g^2 + (g - 1)^2) of it.
NETWORK = 10.0
USUAL_GUIDANCE = 4.5
FEWEST, MOST_MOVED = 6, 0.25  # samples of a step, and q: beyond, no formula can be read from it
SHARED = 0.5  # covariance of noise that velocities cannot explain, as in the health rules
AUTO = 16.0  # k of the default bound, clip_ratio=auto:16
WIDEST = 0.05  # ten times the widest clip of a published recipe for flow models
OFF_CENTRE = 0.05  # mean of advantages that should have none, relative to their size
Findings = Iterator[tuple[str, str]]  # key of remedies.yaml, and evidence


def examine(dump: Dump) -> list[tuple[str, str]]:
    """Looks for all that numbers alone show."""
    squares = difference = None
    if dump.means is not None:
        squares = (dump.end - dump.means).double().square().mean(2)
    ours = theirs = explain(dump, dump.rollout, squares, torch.zeros(len(dump.sigmas) - 1))
    if ours is not None and dump.old is not None and not torch.equal(dump.old, dump.rollout):
        difference = dump.old - dump.rollout
        theirs = explain_old(dump, dump.old, squares, ours)
    findings = [*check_formulas(dump, ours, theirs, squares), *check_numbers(dump)]
    if ours is not None:
        findings += check_noise(dump, ours.drawn)
        if theirs is not None and theirs.words == ours.words:
            findings += check_mismatch(dump, ours, squares, difference)
            findings += check_clip(dump, difference)
    return [*findings, *check_training(dump)]


def explain_old(dump: Dump, old: Tensor, squares: Tensor | None, ours: Formula) -> Formula | None:
    """Returns the formula of the training graph's log-probs [B, T], given that of the rollout's."""
    values, slope = ours.values(dump)
    if squares is None:  # the rollout's log-probs tell them
        squares = ours.drawn.square() * (1 + (values - dump.rollout) / slope).clamp(min=0)
    # A wrong formula changes how a log-prob depends on the noise, which is a line through the
    # rollout's. What is beside that line comes of other means.
    x, y = (side - by_step(dump, side)[0][dump.place] for side in (dump.rollout, old))
    line = by_step(dump, x * y)[0] / by_step(dump, x * x)[0]
    beside = (y / line[dump.place] - x) * 0.5 / slope
    variance, count = by_step(dump, beside.square())
    q = dump.end.shape[2] * variance * (1 + SIGMAS * (2 / count).sqrt())
    seen = count > 0
    if count[seen].min() < FEWEST or q[seen].max() > MOST_MOVED:  # the means differ, say
        return ours
    return explain(dump, old, squares, q.nan_to_num(0.0))


def check_formulas(
    dump: Dump, ours: Formula | None, theirs: Formula | None, squares: Tensor | None
) -> Findings:
    """Says whose log-probs are not those of the settings."""
    sides = {"the rollout": ours, "the training graph": theirs}
    if ours is not None and theirs is not None and ours.words == theirs.words:
        # Without its normaliser on both sides, a log-prob has the same ratios.
        sides = {"both sides": ours} if ours.form != "plain" else {}
    elif ours is not None and theirs is not None and not ours.cause and not theirs.cause:
        sides = {"the rollout alone": ours._replace(cause="convention")}
    wanted = declared(dump)[0].values(dump, squares)[0].nanmean().item()
    for side, formula in sides.items():
        if formula is None:
            yield "formula", f"log-probs of {side} fit neither the settings nor a known mistake"
            return
        if formula.cause:
            found = formula.values(dump, squares)[0].nanmean().item()
            evidence = f"log-probs of {side} are those of {formula.words}: {found:.4g} in the mean"
            yield formula.cause, f"{evidence}, where the settings give {wanted:.4g}"


def check_numbers(dump: Dump) -> Findings:
    """Looks for rounded timesteps and log-probs."""
    if dump.timesteps is not None:
        wanted = sigma(dump) * (1000 if dump.timesteps.max() > 1 else 1)
        apart = (dump.timesteps - wanted).abs().max().item()
        ways = {"whole numbers": wanted.round(), "whole numbers below": wanted.floor()}
        ways |= {name: wanted.to(dtype).double() for name, dtype in HALF.items()}
        near = [way for way, to in ways.items() if torch.allclose(dump.timesteps, to, rtol=2e-6)]
        if apart > 2e-6 * dump.timesteps.max():
            how = f"they are {(*near, 'of another schedule')[0]}"
            yield "timestep", f"timesteps differ from 1000 sigma by up to {apart:.3g}: {how}"
    for values in (dump.rollout, dump.rollout if dump.old is None else dump.old):
        for name, dtype in HALF.items():
            if torch.equal(values, values.to(dtype).double()):
                yield "log_probs", f"all log-probs of a side are numbers of {name}"
                return


def check_noise(dump: Dump, std: Tensor) -> Findings:
    """Looks for noise that steps share, and with means for noise that is not standard normal."""
    thin, whole = slice(None, None, max(1, dump.end.shape[2] // ELEMENTS)), std.isfinite().all(0)
    means = state_part(dump) if dump.means is None else dump.means
    noise = ((dump.end - means) / std.unsqueeze(2).float())[:, whole, thin]
    if dump.means is not None:
        said = [*check_sharing(noise), *check_moments(noise)]
        if said:
            yield "noise", "; ".join(said)
        return
    shared = shared_noise(noise, (noise.square().mean(2) - 1).clamp(min=0), len(noise)).item()
    if shared > SHARED:
        yield "noise", f"steps share noise: {shared:.2f} of it, which no velocities explain"


def state_part(dump: Dump) -> Tensor:
    """Returns what the states before the steps contribute to the means, [B, T, D]."""
    return gaussian(dump, sigma(dump), sigma(dump, 1))[0].float().unsqueeze(2) * dump.start


def check_mismatch(
    dump: Dump, formula: Formula, squares: Tensor | None, difference: Tensor | None
) -> Findings:
    """Looks for latents that were rounded behind their log-prob, and for other weights."""
    elements, variance = dump.end.shape[2], formula.drawn.square()
    if difference is None and squares is not None:
        difference = dump.rollout - formula.values(dump, squares)[0]
    if difference is None:
        return
    d = difference * 0.5 / formula.values(dump)[1]
    # From the mean square of d, which is q / D + q^2 / 4.
    q = 2 * ((d.square() + elements**-2).sqrt() - 1 / elements)
    for name, dtype in HALF.items():
        if torch.equal(dump.end, dump.end.to(dtype).float()):
            # The distance of two numbers, from the power of 2 below them; rounding is uniform.
            spacing = torch.finfo(dtype).eps * torch.exp2(torch.frexp(dump.end).exponent - 1.0)
            rounding = (spacing.double().square().mean(2) / 12 / variance).nanmean()
            if q.nanmean() > rounding / 4:
                size, found = ((each / elements).sqrt().item() for each in (rounding, q.nanmean()))
                evidence = f"all latents are numbers of {name}, which explains a mismatch of"
                yield (
                    "latents",
                    f"{evidence} {size:.1g} in log-probs from before: it is {found:.1g}",
                )
                return
    moved = (dump.end if dump.means is None else dump.means) - state_part(dump)
    velocity = (moved.double().square().mean(2) / variance).nanmean() - float(dump.means is None)
    guidance = dump.settings.get("guidance_scale", USUAL_GUIDANCE)
    once = torch.finfo(torch.bfloat16).eps / math.sqrt(12)
    explained = NETWORK * once * math.hypot(guidance, guidance - 1)
    steps = d.isfinite().sum(1)
    chance = 1 + SIGMAS * (2 / steps).sqrt()
    errors = (q.nansum(1) / steps / chance / velocity.clamp(min=1e-30)).sqrt()
    if velocity > 0 and errors.max() > explained:
        worst, number = errors.max().item(), int((errors > explained).sum())
        evidence = (
            f"{number} of {len(errors)} samples have velocities that differ between the sides"
        )
        bound = (
            f"by up to {100 * worst:.0f}%, and bf16 explains {100 * explained:.0f}% with guidance"
        )
        yield "stale", f"{evidence} {bound} {guidance:g}: other weights, guidance or prompts"


def check_training(dump: Dump) -> Findings:
    """Looks for a policy that no update moves, and for advantages without signal or centre."""
    if dump.new is not None and dump.old is not None and torch.equal(dump.new, dump.old):
        yield "lora", f"all {dump.new.numel()} ratios are exactly 1 after an update"
    if dump.advantages is None:
        return
    values = dump.advantages
    group = torch.arange(len(values)) if dump.group is None else dump.group
    _, group, count = group.unique(return_inverse=True, return_counts=True)
    size = values.square().mean().sqrt().clamp(min=1e-30)
    zeros = torch.zeros(len(count), dtype=torch.float64)
    means = zeros.index_add(0, group, values) / count / size
    spread = zeros.index_add(0, group, (values / size - means[group]).square())
    equal = (spread < 1e-9) & ((count > 1) | (means == 0))
    off, whose = values.mean() / size, "all"
    surely = off.abs() * math.sqrt(len(values)) > SIGMAS
    if count.min() > 1 and len(count.unique()) == 1:  # whole groups, so it seems
        off, whose = means.abs().median(), "a group, typically,"
        surely = off > OFF_CENTRE
    if equal.double().mean() > MOST_EQUAL:
        yield "no_signal", f"{int(equal.sum())} of {len(count)} groups have one advantage only"
    elif surely:
        yield "advantages", f"the mean of {whose} is {off.item():.2g} of their size, not 0"


def check_clip(dump: Dump, difference: Tensor | None) -> Findings:
    """Compares the clip with the mismatch before any update."""
    clip = dump.settings.get("clip_ratio", WIDEST)
    sizes = torch.zeros(1) if difference is None else torch.expm1(difference).abs()
    fitting = AUTO * ROBUST * sizes.median().item()
    outside = (sizes > clip).double().mean().item()
    if clip > max(WIDEST, fitting):
        nats = clip * dump.end.shape[2]
        yield "clip_wide", f"clip_ratio={clip:g} lets a step of a sample move by {nats:.2g} nats"
    elif outside > MOST_CLIPPED and str(dump.settings.get("bypass_mode")).lower() != "false":
        evidence = f"{100 * outside:.0f}% of the ratios are beyond clip_ratio={clip:g} before any"
        pull = "update, which pulls to the rollout's policy; 16 robust deviations are"
        yield "clip_narrow", f"{evidence} {pull} {round_up(fitting, 2):g}"
