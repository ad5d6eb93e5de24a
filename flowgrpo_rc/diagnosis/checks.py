"""Finds what is wrong with dumped steps, the most probable cause first.

A cause stands before its consequences: any wrong formula makes a mismatch, and a mismatch fills the
clip band. So the checks have an order, and some are not asked behind others.

Legend: B samples, T steps of each, S steps of the schedule, D elements of a latent; d the log-prob
of the training graph before any update less the rollout's, in Gaussian units. If two policies have
means that differ by delta, d is -q / 2 +- sqrt(q / D), with q = mean_D delta^2 / std^2.
"""

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from flowgrpo_rc.calibration.causes import Symptom
from flowgrpo_rc.calibration.noise import (
    HALF,
    SIGMAS,
    check_moments,
    check_sharing,
    half_precision,
)
from flowgrpo_rc.core.advantages import group_relative
from flowgrpo_rc.diagnosis.dump import Dump
from flowgrpo_rc.diagnosis.formulas import PLAIN, Formula, declared, explain, gaussian
from flowgrpo_rc.monitoring.health_rules import MOST_CLIPPED, MOST_EQUAL
from flowgrpo_rc.monitoring.noise import ELEMENTS, shared_noise

# A network in bf16 makes 2 to 10 times the error of rounding its output once (measured), and
# guidance g makes sqrt(g^2 + (g - 1)^2) of it.
NETWORK = 10.0
USUAL_GUIDANCE = 4.5
SHARED = 0.5  # covariance of noise that velocities cannot explain, as in the health rules
WIDEST = 0.05  # ten times the widest clip of a published recipe for flow models
OFF_CENTRE = 0.05  # mean of advantages that should have none, relative to their size
Evaluate = Callable[[Dump, Formula], Sequence[Symptom]]


def examine(dump: Dump, evaluate: Evaluate | None = None) -> list[Symptom]:
    """Looks for all that numbers show, and asks `evaluate` where no formula is wrong."""
    squares = None if dump.means is None else (dump.end - dump.means).double().square().mean(2)
    ours = explain(dump, dump.rollout, squares)
    if ours is None:
        unknown = "log-probs of the rollout fit neither the settings nor a known mistake"
        return [Symptom("formula", unknown), *check_numbers(dump), *check_update(dump)]
    theirs = ours
    difference = None if squares is None else dump.rollout - ours.values(dump, squares)[0]
    if dump.old is not None and not torch.equal(dump.old, dump.rollout):
        difference = dump.old - dump.rollout
        known = ours.squares(dump, dump.rollout) if squares is None else squares
        theirs = explain(dump, dump.old, known, ours) or ours
    if theirs.words != ours.words:  # which makes a difference by itself
        difference = None
    symptoms = [*check_formulas(dump, ours, theirs, squares)]
    replayed = [] if symptoms or evaluate is None else evaluate(dump, ours)
    symptoms += [*check_numbers(dump), *check_noise(dump, ours.drawn), *replayed]
    if difference is not None and not replayed:
        symptoms += check_mismatch(dump, ours, difference)
    return [*symptoms, *check_update(dump, difference)]


def check_formulas(
    dump: Dump, ours: Formula, theirs: Formula, squares: Tensor | None
) -> Iterator[Symptom]:
    """Says whose log-probs are not those of the settings."""
    sides = {"the rollout": ours, "the training graph": theirs}
    if ours.words == theirs.words:
        # Without its normaliser on both sides, a log-prob has the same ratios.
        both = "the rollout" if dump.old is None else "both sides"
        sides = {both: ours} if ours.form != PLAIN else {}
    elif not ours.cause and not theirs.cause:
        sides = {"the rollout alone": ours._replace(cause="convention")}
    by_settings = declared(dump)[0].values(dump, squares)[0].nanmean()
    for side, formula in sides.items():
        if formula.cause:
            mean = formula.values(dump, squares)[0].nanmean()
            means = f"{mean:.4g} in the mean, and {by_settings:.4g} by the settings"
            evidence = f"log-probs of {side} are those of {formula.words}: {means}"
            yield Symptom(formula.cause, evidence)


def check_numbers(dump: Dump) -> Iterator[Symptom]:
    """Looks for rounded timesteps and log-probs."""
    if dump.timesteps is not None:
        of_sigmas = dump.sigma() * (1000 if dump.timesteps.max() > 1 else 1)
        apart = (dump.timesteps - of_sigmas).abs().max()
        if apart > 2e-6 * dump.timesteps.max():
            evidence = f"timesteps, rounded perhaps, are up to {apart:.3g} off 1000 sigma"
            yield Symptom("timestep", evidence)
    for side, log_probs in (("rollout", dump.rollout), ("training graph", dump.old)):
        rounded = None if log_probs is None else half_precision(log_probs)
        if rounded:
            yield Symptom("log_probs", f"all log-probs of the {side} are numbers of {rounded}")
            return


def check_noise(dump: Dump, std: Tensor) -> Iterator[Symptom]:
    """Looks for noise that steps share, and with means for noise that is not standard normal."""
    thin = slice(None, None, max(1, dump.end.shape[2] // ELEMENTS))
    whole = std.isfinite().all(0)
    means = state_part(dump) if dump.means is None else dump.means
    noise = ((dump.end - means) / std.unsqueeze(2).float())[:, whole, thin]
    if dump.means is not None:
        yield from check_sharing(noise)
        yield from check_moments(noise)
        return
    shared = shared_noise(noise, (noise.square().mean(2) - 1).clamp(min=0), len(noise))
    if shared > SHARED:
        evidence = f"steps share noise: {shared:.2f} of it, which no velocities explain"
        yield Symptom("noise", evidence)


def state_part(dump: Dump) -> Tensor:
    """Returns what the states before the steps contribute to the means, [B, T, D]."""
    return gaussian(dump, dump.sigma(), dump.sigma(1))[0].float().unsqueeze(2) * dump.start


def check_mismatch(dump: Dump, formula: Formula, difference: Tensor) -> Iterator[Symptom]:
    """Looks for latents that were rounded behind their log-prob, and for other weights."""
    elements = dump.end.shape[2]
    variance = formula.drawn.square()
    d = difference * 0.5 / formula.values(dump)[1]
    # From the mean square of d, which is q / D + q^2 / 4.
    q = 2 * ((d.square() + elements**-2).sqrt() - 1 / elements)
    for name, dtype in HALF.items():
        if torch.equal(dump.end, dump.end.to(dtype).float()):
            # Numbers are eps / 2 to eps of their size apart, and rounding is uniform.
            rounding = (torch.finfo(dtype).eps * dump.end).double().square().mean(2) / 24 / variance
            if q.nanmean() > rounding.nanmean() / 4:
                evidence = f"all latents are numbers of {name}, and the mismatch shows it"
                yield Symptom("latents", evidence)
                return
    moved = (dump.end if dump.means is None else dump.means) - state_part(dump)
    velocity = (moved.double().square().mean(2) / variance).nanmean() - float(dump.means is None)
    guidance = dump.settings.get("guidance_scale", USUAL_GUIDANCE)
    once = torch.finfo(torch.bfloat16).eps / math.sqrt(12)
    explained = NETWORK * once * math.hypot(guidance, guidance - 1)
    chance = 1 + SIGMAS * (2 / d.isfinite().sum(1)).sqrt()
    errors = (q.nanmean(1) / chance / velocity.clamp(min=1e-30)).sqrt()
    number = int((errors > explained).sum())
    if velocity > 0 and number:
        samples = f"{number} of {len(errors)} samples have velocities that differ between the sides"
        bound = f"{errors.max():.0%}, and bf16 explains {explained:.0%} with guidance {guidance:g}"
        evidence = f"{samples} by up to {bound}: other weights, guidance or prompts"
        yield Symptom("stale", evidence)


def check_update(dump: Dump, difference: Tensor | None = None) -> Iterator[Symptom]:
    """Compares the clip with the mismatch before any update; then looks for a policy that no update
    moves, and for advantages without signal or centre.
    """
    clip = dump.settings.get("clip_ratio", WIDEST)
    outside = torch.zeros(1) if difference is None else torch.expm1(difference).abs() > clip
    share = outside.double().mean()
    if clip > WIDEST:
        nats = clip * dump.end.shape[2]
        evidence = f"clip_ratio={clip:g} lets a step of a sample move by {nats:.2g} nats"
        yield Symptom("clip_wide", evidence)
    elif share > MOST_CLIPPED and str(dump.settings.get("bypass_mode")).lower() != "false":
        ratios = f"{share:.0%} of the ratios are beyond clip_ratio={clip:g} before any update"
        yield Symptom("clip_narrow", f"{ratios}, which pulls to the rollout's policy")
    if dump.new is not None and dump.old is not None and torch.equal(dump.new, dump.old):
        yield Symptom("lora", f"all {dump.new.numel()} ratios are exactly 1 after an update")
    if dump.advantages is not None:
        yield from check_advantages(dump.advantages, dump.group)


def check_advantages(advantages: Tensor, group: Tensor | None) -> Iterator[Symptom]:
    """Looks for advantages [B] without signal, or whose mean is not 0 in a group."""
    values = advantages / advantages.square().mean().sqrt().clamp(min=1e-30)
    if group is None:
        equal = values == 0
        mean = values.mean().abs()
        allowed = SIGMAS / math.sqrt(len(values))
    else:
        index = group.unique(return_inverse=True)[1]
        relative = group_relative(values, index, values.isfinite(), norm_by_std=False)
        equal = relative.zero_std
        mean = (values - relative.values).abs().median()
        allowed = OFF_CENTRE
    if equal.double().mean() > MOST_EQUAL:
        evidence = f"{int(equal.sum())} of {len(equal)} groups have one advantage only"
        yield Symptom("no_signal", evidence)
    elif mean > allowed:
        evidence = f"their mean in a group is {mean:.2g} of their size, not 0"
        yield Symptom("advantages", evidence)
