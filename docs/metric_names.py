"""Every metric that a run can report: its name, its unit and its meaning.

`docs/metrics.md` is written from this table, and a test compares the table with the names in the
code and with runs. A part of a name in braces stands for what the meaning says.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from textwrap import dedent
from typing import NamedTuple

from flowgrpo_rc.correction.metric_names import SLIME_FRACTIONS, SLIME_NAMES


class Metric(NamedTuple):
    """A metric.

    Attributes:
      name: as in metrics.jsonl; a part in braces stands for several names.
      unit: empty for a number without one.
      meaning: one sentence.
    """

    name: str
    unit: str
    meaning: str

    def covers(self, name: str) -> bool:
        """Returns True if `name` is this metric."""
        # re.escape writes a placeholder as \{term\}; it stands for any text.
        pattern = re.sub(r"\\\{\w+\\\}", ".+", re.escape(self.name))
        return bool(re.fullmatch(pattern, name))


class Section(NamedTuple):
    """Metrics that are explained together, in one table of docs/metrics.md.

    Attributes:
      title: heading of the table.
      about: text above the table.
      metrics: its rows.
    """

    title: str
    about: str
    metrics: Sequence[Metric]


def _section(title: str, about: str, table: str) -> Section:
    """Makes a section from lines `name | unit | meaning`; an indented line continues the last."""
    lines = dedent(table).strip().replace("\n    ", " ").splitlines()
    rows = [[cell.strip() for cell in line.split(" | ")] for line in lines]
    metrics = [Metric(name, unit.strip("-"), meaning) for name, unit, meaning in rows]
    return Section(title, about, metrics)


_REWARDS = _section(
    "Rewards",
    "`reward/*` is what training samples got, in every step; `val/*` is what held-out ones got, in "
    "steps with an evaluation.",
    """
    reward/mean | reward | Weighted sum of the rewards, over the samples that have one.
    reward/std | reward | Its standard deviation.
    reward/failed_fraction | fraction | Samples that some reward could not score.
    reward/{term} | reward | One reward of `reward.terms` before its weight, and its parts as
        `{term}/{part}`.
    val/reward | reward | As `reward/mean`, of the held-out samples.
    val/std | reward | Its standard deviation.
    val/failed_fraction | fraction | Held-out samples that some reward could not score.
    val/{term} | reward | One reward of the held-out samples, and its parts.
    """,
)
_SUITES = _section(
    "Suites",
    "With `trainer.suites`, in steps with an evaluation: the questions of [a "
    "suite](reports.md#suites), asked of the trained model. environment.json has the protocol of "
    "each: two numbers compare only if its digests are equal.",
    """
    suite/{suite}/reward | reward | Weighted sum of the suite's rewards, the mean over its prompts.
    suite/{suite}/{term} | reward | One of these rewards, and its parts as `{term}/{part}`.
    suite/{suite}/change | reward | `reward` minus that of the base model, from the same noises.
    suite/{suite}/change_low | reward | Lower end of the 95% confidence interval of the change.
    suite/{suite}/change_high | reward | Upper end.
    suite/{suite}/failed_fraction | fraction | Samples that some reward could not score.
    """,
)
_ADVANTAGES = _section(
    "Advantages",
    "What the rewards become, before `adv_clip_max`.",
    """
    advantages/mean | - | Over the samples that have a reward; in decoupled mode without those whose
        steps are all rejected (`exclude_rejected`).
    advantages/std | - | Their standard deviation.
    advantages/max | - | The largest.
    advantages/min | - | The smallest.
    advantages/trained_fraction | fraction | Part of the sum of squared advantages that is trained
        on, with `actor.train_n`.
    zero_std_ratio | fraction | Groups whose rewards are all equal, and which therefore teach
        nothing.
    advantages/single_ratio | fraction | Groups of which one sample at most has a reward.
    advantages/identical_ratio | fraction | Groups whose samples are all the same.
    groups/dropped_equal | groups | With `algorithm.filter_groups`: dropped, since their rewards are
        all equal.
    groups/dropped_failed | groups | Dropped, since a sample has no reward.
    groups/refills | batches | Times that further prompts were sampled for them, one for each.
    groups/unfilled | groups | Still to be dropped after the last refill.
    groups/drawn_reward | reward | Mean of all samples, those of dropped groups included, which
        `reward/*` leaves out.
    """,
)
_UPDATE = _section(
    "Update",
    "Over all mini-batches of a step. Log-probs of images are means over the latent's elements.",
    """
    actor/pg_loss | - | The policy loss.
    actor/kl_loss | nats | KL to `actor.kl_reference`, before its coefficient.
    actor/ratio_mean | ratio | Current over old policy, over the steps that are kept.
    actor/ratio_std | ratio | Its standard deviation.
    actor/clip_fraction | fraction | Steps outside the clip band; with `flow_dppo` those that it
        masks.
    actor/clip_fraction_higher | fraction | Steps above the band.
    actor/clip_fraction_lower | fraction | Steps below the band.
    actor/auto_bound_mean | - | The bound that `clip_ratio=auto:k` or `kl_threshold=auto:k` set,
        over the steps that have one.
    actor/auto_bound_warm_fraction | fraction | Steps that have one: enough was observed there.
    actor/dual_clip_fraction | fraction | Steps or tokens that the dual clip bounds; images with
        `dual_clip`, text with `clip_ratio_c`.
    actor/positive_loss | - | Weighted error of the positive policy; `diffusion_nft`.
    actor/negative_loss | - | That of the implicit negative one.
    actor/old_deviation | - | Mean squared difference of the velocity from that of the old policy.
    actor/old_decay | - | How much of itself the old policy kept at the end of the step.
    actor/step_kl_mean | nats | Exact KL of a step, old to current policy; `grpo_guard` and
        `flow_dppo`.
    actor/step_kl_max | nats | The largest.
    actor/kl_above_threshold_fraction | fraction | Steps whose KL is above `kl_threshold`;
        `flow_dppo`.
    actor/ois | ratio | slime's name of `actor/ratio_mean`; decoupled mode with `metric_names` other
        than verl.
    actor/grad_norm | - | Norm of the gradient before `clip_grad`, over the updates where it is
        finite.
    actor/adam_eps_fraction | fraction | Of the LoRA elements that have had a gradient, those
        where it is below AdamW's eps (sqrt(v_hat) < eps), so that they move less than
        `actor.optim.lr` says; after the step's last update, and not with `adamw_8bit`.
    actor/lr | - | The largest learning rate of the step's updates.
    actor/nonfinite_update_fraction | fraction | Updates of this step that were skipped: no finite
        gradient.
    actor/nonfinite_updates | updates | Updates skipped since the start of the run.
    """,
)
_ROLLOUT = _section(
    "Rollout",
    "What was sampled. `rollout/staleness_*` and `policy_version_*` are there with "
    "`rollout.staleness`, `workers/*` with `rollout.workers`.",
    """
    scouts/reward | reward | With `rollout.redraw`: mean of the pool that the rollout has drawn.
    scouts/reward_difference | reward | Mean |difference| of a chosen sample's reward when it is
        drawn again.
    rollout/saved_blocks_fraction | fraction | With `rollout.cache`: evaluations of a block that
        were saved, of all that a rollout without it takes; one for each row of a forward.
    rollout/latents_16bit_fraction | fraction | Latents that 16 bits hold exactly; near 1, an engine
        rounds them.
    rollout/noise_variance | - | Mean square of the noise of the stochastic steps; 1 for standard
        normal noise.
    rollout/noise_variance_off | - | How far it is from 1, beyond 8 statistical errors.
    rollout/noise_shared_max | - | The largest covariance of the noise of two steps, of one sample
        or two of a group; 1 if they share it.
    rollout/noise_of_seed_min | - | How much of the noise is what the sample's seed gives: 1 or 0;
        for engines that say that they draw it.
    rollout/conditioning_error_max | ratio | The largest relative difference between a token's
        embedding in the rollout and the trainer's; in step 1 and every 100 steps.
    rollout/staleness_mean | steps | How far the sampling weights were behind those before the
        update.
    rollout/staleness_max | steps | The largest.
    rollout/policy_version_min | steps | The oldest step after which sampling weights were taken.
    rollout/policy_version_max | steps | The newest.
    workers/busy_fraction | fraction | The share of the time since the last step's rollout that a
        worker had a chunk.
    workers/ready | workers | Workers that sample, without those that start.
    workers/longest_queue | chunks | The most chunks that waited for a worker at once.
    workers/mib_received | MiB | Size of what the workers sent.
    workers/restarts | workers | Workers that were started again, since the command began.
    response/length_mean | tokens | Text: length of a response, its end included.
    response/length_max | tokens | The longest.
    response/length_min | tokens | The shortest.
    response/limit_fraction | fraction | Responses cut at `rollout.response_length`.
    response/empty_fraction | fraction | Responses without any text.
    """,
)
_PICTURES = _section(
    "Pictures",
    "Statistics of the training samples, each from 0 to 1, measured on the middle 256 x 256 pixels "
    "of a picture and on three frames of a video. `NAME_std` is the standard deviation between "
    "pictures. A reward that is gamed shows in them ([what to do](troubleshooting.md#it-warns)).",
    """
    pictures/brightness | - | Mean luma.
    pictures/saturation | - | Mean saturation, as HSV defines it.
    pictures/contrast | - | Standard deviation of the luma within a picture.
    pictures/edges | - | Mean difference between the luma of neighbours.
    pictures/fine_detail | - | Root mean square of what a pixel's luma differs from the mean of its
        four neighbours.
    pictures/diversity | - | How far the pictures of a prompt differ: standard deviation of the mean
        colours of 8 x 8 cells over the group.
    pictures/{statistic}_std | - | Standard deviation of a statistic between pictures; of
        `diversity` between groups.
    pictures/prompts | prompts | Prompts whose pictures were measured.
    pictures/drift | deviations | The largest move of a statistic since the first step (the first
        steps, until they have 8 prompts), in its standard deviations then, or 0.01 if those are
        smaller.
    pictures/reward_gain | deviations | The rise of `reward/mean` since then, in `reward/std` then.
    """,
)
_MISMATCH = _section(
    "Noise floor",
    "Training minus rollout log-probs before the first update of a step. Here and in the next "
    "three tables names stand for `rollout_corr/NAME` in decoupled mode and "
    "`actor/rollout_corr/NAME` in bypass mode; [what they "
    "tell](rollout_correction.md#the-noise-floor).",
    """
    logprob_abs_diff_mean | nats | Mean size of the difference.
    logprob_abs_diff_p50 | nats | Its median.
    logprob_abs_diff_p99 | nats | Its 99th percentile.
    logprob_abs_diff_max | nats | The largest.
    logprob_abs_diff_std_robust | nats | 1.4826 times the median absolute deviation of the
        difference.
    logprob_abs_diff/ts_{t} | nats | Mean size at timestep t of the schedule (images).
    mismatch_over_clip | ratio | The median size over the clip band.
    mismatch_over_expected | ratio | The mean size over what the precisions explain; above 2 it is a
        fault. Text: reported whenever the steps since the last report have 800 tokens.
    pre_update_clip_fraction | fraction | Steps outside the clip band before any update: clipped by
        noise.
    policy_drift_abs_mean | nats | How far the updates moved what is evaluated after the first of
        them.
    """,
)
_GAP = _section(
    "Divergence",
    "Rollout against training policy: before the update in decoupled mode, over the update, and "
    "with its movement, in bypass mode.",
    """
    training_log_ppl | nats | Minus the mean log-prob of a sequence under the training policy.
    training_ppl | - | Its exponential, the perplexity.
    rollout_log_ppl | nats | Minus the mean log-prob of a sequence under the rollout.
    rollout_ppl | - | Its exponential.
    log_ppl_diff | nats | Training minus rollout log-perplexity, positive where training is less
        confident.
    log_ppl_abs_diff | nats | Mean size of that difference.
    log_ppl_diff_max | nats | Its largest value.
    log_ppl_diff_min | nats | Its smallest value.
    ppl_ratio | ratio | Mean ratio of training and rollout perplexity.
    kl | nats | Mean of rollout minus training log-prob, of either sign.
    k3_kl | nats | The k3 estimate of the same KL, never negative.
    chi2_token | - | Chi-squared divergence estimated from the ratios of steps.
    chi2_seq | - | The same from the ratios of sequences.
    """,
)
_WEIGHTS = _section(
    "Importance weights",
    "Those of `rollout_is`, or of the token level where it is null. A weight is the bounded ratio "
    "of training and rollout.",
    """
    rollout_is_mean | ratio | Mean weight after the bounds, before batch normalisation.
    rollout_is_raw_mean | ratio | Mean weight before the bounds.
    rollout_is_std | ratio | Standard deviation of the weights.
    rollout_is_max | ratio | The largest: applied ones of steps, unbounded ones of sequences.
    rollout_is_min | ratio | The smallest, likewise.
    rollout_is_eff_sample_size | fraction | Share of the batch that carries the gradient, 1 for
        equal weights.
    rollout_is_ratio_fraction_high | fraction | Weights above the upper bound.
    rollout_is_ratio_fraction_low | fraction | Weights below the lower bound (`truncate`: its
        reciprocal).
    rollout_is_oob_ratio | fraction | Weights beyond either bound; every mode but `truncate`.
    rollout_is_batch_norm_factor | ratio | What batch normalisation divides by.
    rollout_is_seq_mean | ratio | Mean of the sequences' mean weights.
    rollout_is_seq_std | ratio | Their standard deviation.
    rollout_is_seq_max | ratio | The largest.
    rollout_is_seq_min | ratio | The smallest.
    rollout_is_seq_max_deviation | ratio | The largest distance from 1.
    rollout_is_seq_fraction_high | fraction | Sequences whose mean weight is above the bound.
    rollout_is_seq_fraction_low | fraction | Sequences whose mean weight is below it.
    """,
)
_REJECTION = _section(
    "Rejection",
    "All criteria together, then each alone; `criterion` is one of `rollout_rs`. Statistics of an "
    "`auto` band are in robust standard deviations from the median.",
    """
    rollout_rs_masked_fraction | fraction | Steps that are rejected, by whatever rule.
    rollout_rs_seq_masked_fraction | fraction | Sequences with a rejected step.
    rollout_is_masked_fraction | fraction | As `rollout_rs_masked_fraction`.
    rollout_is_seq_masked_fraction | fraction | As `rollout_rs_seq_masked_fraction`.
    rejected_ratio | fraction | As `rollout_rs_seq_masked_fraction`.
    rollout_rs_nonfinite_fraction | fraction | Steps rejected because their difference is not
        finite.
    rollout_is_veto_fraction | fraction | Sequences that the veto rejects.
    rollout_is_catastrophic_token_fraction | fraction | Steps below the threshold of the veto.
    excluded_fraction | fraction | Samples that left the baseline of their group, all their steps
        rejected.
    rollout_rs_{criterion}_mean | statistic | Mean of the criterion's statistic.
    rollout_rs_{criterion}_std | statistic | Its standard deviation, clamped to the band.
    rollout_rs_{criterion}_max | statistic | The largest.
    rollout_rs_{criterion}_min | statistic | The smallest.
    rollout_rs_{criterion}_fraction_high | fraction | Above the band; for k1 that is a ratio below
        it.
    rollout_rs_{criterion}_fraction_low | fraction | Below the band.
    rollout_rs_{criterion}_masked_fraction | fraction | Steps that this criterion rejects.
    rollout_rs_{criterion}_seq_masked_fraction | fraction | Sequences in which it rejects a step.
    rollout_rs_{criterion}_seq_mean | statistic | Mean of the sequences' means.
    rollout_rs_{criterion}_seq_std | statistic | Their standard deviation.
    rollout_rs_{criterion}_seq_max | statistic | The largest.
    rollout_rs_{criterion}_seq_min | statistic | The smallest.
    rollout_rs_{criterion}_seq_max_deviation | statistic | The largest distance from 0.
    rollout_rs_{criterion}_seq_fraction_high | fraction | Sequences whose mean is above the band.
    rollout_rs_{criterion}_seq_fraction_low | fraction | Sequences whose mean is below it.
    rollout_rs_{criterion}_auto_spread | nats | Robust standard deviation that an `auto` band goes
        by.
    rollout_rs_{criterion}_auto_warm_fraction | fraction | Steps whose `auto` band has seen enough
        to reject.
    """,
)
_COST = _section(
    "Time and memory",
    "Of the slowest process; a phase that did not happen in a step is absent.",
    """
    timing_s/step | seconds | The whole step, without evaluation and checkpoint.
    timing_s/rollout | seconds | Sampling, or waiting for samples with `rollout.staleness`.
    timing_s/old_log_prob | seconds | Before the rewards: the recompute of the old policy, in
        decoupled mode where the update's forwards do not give it, and in some steps of both modes
        the forwards of `mismatch_over_expected`.
    timing_s/reward_wait | seconds | Waiting for rewards after the sampling; where each mini-batch
        waits for its own, it is part of `update`, too.
    timing_s/update | seconds | Forwards, backwards and optimizer.
    timing_s/sync_weights | seconds | Handing the LoRA to the engine.
    timing_s/evaluation | seconds | Held-out samples and their rewards.
    timing_s/suites | seconds | The suites; the first time of a command with those of the base
        model.
    timing_s/checkpoint | seconds | Writing the checkpoint of the step before.
    perf/samples_per_second | 1/second | Samples of all processes over the time of the step.
    perf/peak_memory_gib | GiB | Peak so far of torch's tensors on the GPU, or of the process on a
        CPU.
    perf/reserved_memory_gib | GiB | On a GPU alone: the most that torch has held of it so far,
        with the gaps between tensors.
    perf/device_memory_gib | GiB | On a GPU alone: what all programs hold of it at the end of the
        step.
    """,
)

_OF_CORRECTION = (_MISMATCH, _GAP, _WEIGHTS, _REJECTION)
SECTIONS = (
    _REWARDS,
    _SUITES,
    _ADVANTAGES,
    _UPDATE,
    _ROLLOUT,
    _PICTURES,
    *_OF_CORRECTION,
    _COST,
)
# Pairs of slime's name and ours; dict.fromkeys drops repetitions and keeps the order.
_TABLES = (SLIME_NAMES, *SLIME_FRACTIONS.values())
SLIME = tuple(dict.fromkeys((theirs, ours) for table in _TABLES for ours, theirs in table.items()))


def find(name: str) -> Metric | None:
    """Returns the metric behind a name of metrics.jsonl, verl's or slime's; None if unknown."""
    for prefix in ("actor/rollout_corr/", "rollout_corr/"):
        if name.startswith(prefix):
            own = dict(SLIME).get(name.removeprefix(prefix), name.removeprefix(prefix))
            return _first(_OF_CORRECTION, own)
    return _first([section for section in SECTIONS if section not in _OF_CORRECTION], name)


def _first(sections: Sequence[Section], name: str) -> Metric | None:
    """Returns the metric that covers a name; one without a placeholder comes first."""
    metrics = [metric for section in sections for metric in section.metrics]
    found = [metric for metric in metrics if metric.covers(name)]
    return min(found, key=lambda metric: "{" in metric.name, default=None)
