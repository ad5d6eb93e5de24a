"""Several rewards together: scored in threads during sampling, then summed by weight.

A failure stays with the reward and the samples that it concerns. A sample that a reward could not
score has no reward, rather than 0, which would teach the policy something.

Shapes: N samples of a chunk, B samples of all chunks, F frames of a video, H x W pixels.
"""

import logging
import math
import re
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import accumulate
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flowgrpo_rc.batch import Prompt, Rewards
from flowgrpo_rc.plugins import build, check_choice, check_options, load_class
from flowgrpo_rc.rewards.base import (
    KINDS,
    Reward,
    Samples,
    Scores,
    check_range,
    finite_numbers,
    prompt_name,
)
from flowgrpo_rc.rewards.caller import Caller, users_part
from flowgrpo_rc.rewards.function import Function
from flowgrpo_rc.rewards.groups import Groups, Member, whole_groups

PACKAGE = "flowgrpo_rc.rewards"
_MOST_LISTED = 2  # prompts that cannot be scored, besides the first
PATIENCE_S = 10.0  # for the calls that run when the rewards are closed
_OF_OPTION = re.compile(r"\w+=")  # how a message about one option of a reward begins
logger = logging.getLogger(__name__)


class RewardError(RuntimeError):
    """Too many samples of a step have no reward; training on the rest would hide the fault."""


@dataclass
class RewardConfig:
    """The rewards that score samples.

    terms: name -> {weight (1.0), _target_ (the name itself), and the reward's own options}, or null
        to drop it. `_target_` is a module of flowgrpo_rc.rewards or the full path of a class; give
        it to use a reward twice or to use one out of the tree. Weight 0 logs a reward without
        optimizing it.
    max_failed_fraction: a step raises RewardError if a larger fraction of its samples fails in any
        one reward.
    timeout_s: seconds that a reward may take for one chunk of samples, which then fails; null: no
        limit. The other processes of a run wait for trainer.timeout_s, so it should be below that.
    """

    terms: dict[str, Any] = field(default_factory=lambda: {"ocr": {"weight": 1.0}})
    max_failed_fraction: float = 0.5
    timeout_s: float | None = 1200.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardHandle:
    """A chunk of samples that is being scored; `RewardManager.collect` waits for its rewards."""

    futures: "Mapping[str, Future[_Outcome]]"  # by term
    members: Mapping[str, Sequence[Member]]  # by term that compares groups; empty without groups
    group_size: int  # 0 without groups
    num_samples: int


class Term(NamedTuple):
    """A reward, its weight in the sum, and the keys of its columns: `name` and each `name/part`."""

    reward: Reward
    weight: float
    keys: Sequence[str]


RewardTerms = Mapping[str, Term]  # by name, as `build_terms` makes them


class _Outcome(NamedTuple):
    """The result of one reward for one chunk: by key float64, [N], NaN where it failed."""

    columns: Mapping[str, Tensor]
    error: BaseException | None = None


def settle_rewards(
    config: RewardConfig, terms: RewardTerms, earlier: RewardConfig | None
) -> RewardConfig:
    """Fills in each option that is left to the machine, and returns the settings with it.

    `earlier` is of the run that goes on, if any: it keeps what it has.
    """
    settings = {str(name): options for name, options in config.terms.items()}
    for name, term in terms.items():
        before = {} if earlier is None else earlier.terms.get(name) or {}
        settings[name] = {**settings[name], **term.reward.settle(before)}
    return replace(config, terms=settings)


def check_needs(terms: RewardTerms) -> None:
    """Raises ValueError, naming the term, if a reward lacks what it needs. Loads no model."""
    for name, term in terms.items():
        try:
            term.reward.check()
        except ValueError as error:
            join = "." if _OF_OPTION.match(str(error)) else ": "
            raise ValueError(f"reward.terms.{name}{join}{error}") from error


def check_prompts(
    terms: RewardTerms, prompts: Sequence[Prompt], places: Callable[[], Sequence[str]]
) -> None:
    """Raises ValueError, naming the places of the prompts that a reward cannot score.

    `places` says where each prompt stands. No model that samples is loaded.
    """
    for name, term in terms.items():
        faults = {}
        for prompt in prompts:
            try:
                term.reward.check_prompt(prompt)
            except ValueError as error:
                faults[prompt.index] = error
        if faults:
            where = places()
            first, *others = faults
            file = f"{where[first].rpartition(', ')[0]}, "
            message = f"{where[first]}: reward.terms.{name}: {faults[first]}"
            if others:
                lines = [where[index].removeprefix(file) for index in others[:_MOST_LISTED]]
                lines += ["..."] * (len(others) > _MOST_LISTED)
                message += f"; {len(others)} more of {len(prompts)} prompts: {', '.join(lines)}"
            raise ValueError(message) from faults[first]


def codes(terms: RewardTerms) -> dict[str, object]:
    """Returns the code of each term that is the user's: a function, or a class."""
    rewards = {name: term.reward for name, term in terms.items()}
    return {
        name: reward.score if isinstance(reward, Function) else type(reward)
        for name, reward in rewards.items()
        if isinstance(reward, Function) or not type(reward).__module__.startswith(PACKAGE)
    }


def requires_target(terms: RewardTerms) -> str:
    """Returns the rewards that need a target text in every prompt, for messages; "" for none."""
    return " and ".join(
        f"reward.terms.{name}" for name, term in terms.items() if term.reward.requires_target
    )


def needs_samples(terms: RewardTerms) -> bool:
    """Returns False if all rewards score latents; then nothing has to be decoded."""
    return any(term.reward.kind != "latent" for term in terms.values())


def check_images(terms: RewardTerms, condition_images: int) -> None:
    """Raises ValueError, naming the term, for a reward whose prompts have no images."""
    for name, term in terms.items():
        if term.reward.requires_images and condition_images == 0:
            raise ValueError(
                f"reward.terms.{name} looks at the images of the prompts, which have none by "
                "rollout.pipeline.condition_images=0: set it, or drop the reward by null"
            )


def check_kind(terms: RewardTerms, *kinds: str) -> None:
    """Raises ValueError, naming the term, for a reward that scores none of the model's kinds."""
    for name, term in terms.items():
        if term.reward.kind not in (*kinds, "any"):
            raise ValueError(
                f"reward.terms.{name} scores {term.reward.kind}s, and the model makes "
                f"{' or '.join(f'{kind}s' for kind in kinds)}: drop it with "
                f"reward.terms.{name}=null and give one that scores these, such as function"
            )


class RewardManager:
    """Scores samples with every term of the configuration.

    A reward fails for its whole chunk if it raises, takes longer than `timeout_s`, or returns
    anything but `Scores` of the right length; it fails for a single sample if that sample's value
    is not finite. Calls to one reward never overlap, so it also fails for later chunks as long as a
    call that took too long has not returned.

    Attributes:
      weights: name -> weight of the terms that are optimized.
      last_error: term -> text of its latest failure.
    """

    def __init__(self, config: RewardConfig, terms: RewardTerms | None = None) -> None:
        """Takes the terms as `build_terms` made them; None makes them from the settings."""
        self._terms = build_terms(config) if terms is None else terms
        self._max_failed_fraction = config.max_failed_fraction
        self._callers = {
            name: Caller(term.reward, config.timeout_s, name=f"reward {name}")
            for name, term in self._terms.items()
        }
        self._executor = ThreadPoolExecutor(len(self._terms), thread_name_prefix="reward")
        self._logged: set[tuple[str, type[BaseException]]] = set()
        self.weights = {name: term.weight for name, term in self._terms.items() if term.weight != 0}
        self.needs_samples = needs_samples(self._terms)
        self.last_error: dict[str, str] = {}
        self._causes: dict[str, BaseException | None] = {}  # last errors of the user's code

    def submit(
        self,
        samples: Samples | None,
        prompts: Sequence[Prompt],
        latents: Tensor | None = None,
        groups: Groups | None = None,
    ) -> RewardHandle:
        """Starts to score N samples and returns at once. The samples must not change meanwhile.

        Rewards that compare groups begin in `collect`, when all samples are there; held-out samples
        are no groups, and these rewards leave them out.

        Args:
          samples: uint8 RGB images [N, H, W, 3] or videos [N, F, H, W, 3], or N texts; None if
            all rewards score latents.
          latents: what the samples were decoded from, [N, ...]; None if no reward scores it.
        """
        _check_samples(samples, len(prompts))
        futures = {}
        members = {}
        for name, term in self._terms.items():
            scored = latents if term.reward.kind == "latent" else samples
            assert scored is not None, f"{name} has nothing to score"
            if not term.reward.groupwise:
                futures[name] = self._executor.submit(self._score, name, scored, prompts)
            elif groups is not None:
                members[name] = [*map(Member, groups.of, scored, prompts)]
        size = 0 if groups is None else groups.size
        return RewardHandle(
            futures=futures, members=members, group_size=size, num_samples=len(prompts)
        )

    def collect(self, handles: Sequence[RewardHandle]) -> Rewards:
        """Waits for the handles and returns the rewards of their B samples, in the handles' order.

        `Rewards.total` is NaN where not valid. `Rewards.parts` has the keys `name` and `name/part`
        of every term that takes part. If only rewards that compare groups are optimized, samples
        that are no groups are valid and have no total, NaN.
        """
        grouped: dict[str, list[Future[_Outcome]]] = {}
        for name in handles[0].members:
            members = [member for handle in handles for member in handle.members[name]]
            grouped[name] = [
                self._executor.submit(self._score, name, samples, prompts)
                for samples, prompts in whole_groups(members, handles[0].group_size)
            ]
        columns: dict[str, Tensor] = {}
        for name in self.taking_part(grouped=bool(grouped)):
            futures = grouped.get(name) or [handle.futures[name] for handle in handles]
            outcomes = [future.result() for future in futures]
            for outcome in outcomes:
                self._count(name, outcome)
            for key in self._terms[name].keys:
                columns[key] = torch.cat([outcome.columns[key] for outcome in outcomes])
        weighted = [
            weight * columns[name] for name, weight in self.weights.items() if name in columns
        ]
        total = _nothing(sum(handle.num_samples for handle in handles))
        if weighted:
            total = torch.stack(weighted).sum(0)
        return Rewards(total=total, valid=total.isfinite() | (not weighted), parts=columns)

    def first(self, handles: Sequence[RewardHandle], count: int) -> Rewards:
        """Waits for the chunks of the first `count` samples; the others are not valid yet.

        Their parts are not told. No reward may compare groups.
        """
        ends = [*accumulate(handle.num_samples for handle in handles)]
        known = self.collect(handles[: bisect_left(ends, count) + 1]).total
        total = torch.cat([known, _nothing(ends[-1] - len(known))])
        return Rewards(total=total, valid=total.isfinite(), parts={})

    def taking_part(self, *, grouped: bool) -> list[str]:
        """Returns the terms that score samples which come as groups, or which do not."""
        return [name for name, term in self._terms.items() if grouped or not term.reward.groupwise]

    def part_keys(self, *, grouped: bool) -> list[str]:
        """Returns the keys of `Rewards.parts` for such samples."""
        return [key for name in self.taking_part(grouped=grouped) for key in self._terms[name].keys]

    def count_failed(self, rewards: Rewards) -> dict[str, int]:
        """Returns, by term, how many of these samples it could not score."""
        columns = rewards.parts
        return {name: int(columns[name].isnan().sum()) for name in self._terms if name in columns}

    def check_failed_fraction(self, num_failed: Mapping[str, int], num_total: int) -> None:
        """Raises RewardError if a term failed for more than `max_failed_fraction` of the samples.

        Both numbers are sums over all processes, so that all of them raise together.
        """
        for name, count in num_failed.items():
            if count / num_total > self._max_failed_fraction:
                raise RewardError(
                    f"reward {name!r} failed for {count} of {num_total} samples "
                    f"({count / num_total:.0%}), more than "
                    f"reward.max_failed_fraction={self._max_failed_fraction} allows; last error: "
                    f"{self.last_error.get(name, 'on another process')}"
                ) from self._causes.get(name)

    def close(self) -> None:
        """Drops what has not started, and waits a while for the rest."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        deadline = time.monotonic() + PATIENCE_S
        for caller in self._callers.values():
            caller.close(max(0.0, deadline - time.monotonic()))
        self._executor.shutdown(wait=True)

    def _score(self, name: str, samples: Samples | Tensor, prompts: Sequence[Prompt]) -> _Outcome:
        """Waits for the scores of a chunk in a thread, for which the main one goes on meanwhile.

        A reward is foreign code, so whatever it raises becomes the failure of that chunk, and it
        gets copies, since what it writes into its samples is not for the next reward.
        """
        term = self._terms[name]
        try:
            scores = self._callers[name](*deepcopy((samples, prompts)))
            return _checked(scores, term, prompts)
        except BaseException as error:
            return _Outcome(dict.fromkeys(term.keys, _nothing(len(prompts))), error)

    def _count(self, name: str, outcome: _Outcome) -> None:
        if outcome.error is None:
            return
        values = outcome.columns[name]
        count = int(values.isnan().sum())
        is_foreign = not isinstance(outcome.error, _NotFinite)
        prefix = f"{type(outcome.error).__name__}: " if is_foreign else ""
        self.last_error[name] = f"{prefix}{outcome.error}"
        self._causes[name] = None
        if (trace := users_part(outcome.error)) is not None:
            code = trace.tb_frame.f_code
            place = f"{code.co_qualname} ({code.co_filename}:{trace.tb_lineno})"
            self.last_error[name] += f", in {place}"
            self._causes[name] = outcome.error.with_traceback(trace)
        kind = (name, type(outcome.error))
        if kind not in self._logged:
            self._logged.add(kind)
            logger.warning(
                "reward %r failed for %d of %d samples, which get no reward (this kind of failure "
                "is logged once): %s",
                *(name, count, len(values), self.last_error[name]),
                exc_info=outcome.error if is_foreign else None,
            )


def _nothing(count: int) -> Tensor:
    return torch.full((count,), math.nan, dtype=torch.float64)


def _check_samples(samples: Samples | None, count: int) -> None:
    """Raises ValueError for samples that an engine should not make."""
    if samples is None:
        return
    if isinstance(samples, np.ndarray):
        good = samples.dtype == np.uint8 and samples.ndim in (4, 5) and samples.shape[-1] == 3
        form = f"{list(samples.shape)} {samples.dtype}"
    else:
        good = not isinstance(samples, str) and all(isinstance(text, str) for text in samples)
        form = f"a {type(samples).__name__} of {len(samples)}"
    if not good or len(samples) != count:
        raise ValueError(
            f"the samples of {count} prompts must be images [N, H, W, 3] uint8, videos "
            f"[N, F, H, W, 3] uint8 or a list of texts, not {form}"
        )


class _NotFinite(ValueError):
    """The reward of single samples is not finite; the other samples are fine."""


def _checked(scores: object, term: Term, prompts: Sequence[Prompt]) -> _Outcome:
    """Returns the columns of what a reward returned; TypeError or ValueError for anything else."""
    part_names = term.reward.part_names
    if not isinstance(scores, Scores):
        raise TypeError(f"it returned {type(scores).__name__} instead of Scores")
    if set(scores.parts) != set(part_names):
        raise ValueError(f"it returned the parts {[*scores.parts]}, not {part_names=}")
    columns = {}
    returned = (scores.values, *(scores.parts[name] for name in part_names))
    for key, values in zip(term.keys, returned, strict=True):
        numbers = finite_numbers(values)
        if len(numbers) != len(prompts):
            raise ValueError(f"it returned {len(numbers)} scores for {len(prompts)} samples")
        columns[key] = torch.tensor(numbers, dtype=torch.float64)
    bad = columns[term.keys[0]].isnan().nonzero().flatten().tolist()
    if not bad:
        return _Outcome(columns)
    why = scores.failure or f"{scores.values[bad[0]]!r:.100} is no finite number"
    return _Outcome(columns, _NotFinite(f"{why}, for {prompt_name(prompts[bad[0]])}"))


def build_terms(config: RewardConfig) -> RewardTerms:
    """Builds the rewards, or raises ValueError that names the key. Loads no model."""
    used_terms = {str(name): term for name, term in config.terms.items() if term is not None}
    terms = {name: _build_term(name, term) for name, term in used_terms.items()}
    if not any(term.weight for term in terms.values()):
        raise ValueError(
            f"reward.terms has {', '.join(terms) or 'no reward'}, and needs one of another weight "
            "than 0, such as reward.terms={pickscore: {weight: 1.0}}"
        )
    check_range(0.0, 1.0, **{"reward.max_failed_fraction": config.max_failed_fraction})
    if config.timeout_s is not None:
        check_range(1e-3, **{"reward.timeout_s": config.timeout_s})
    return terms


def _build_term(name: str, term: object) -> Term:
    where = f"reward.terms.{name}"
    if not isinstance(term, Mapping):
        raise ValueError(f"{where}={term!r} must be a mapping such as {{weight: 1.0}}, or null")
    options = {str(key): value for key, value in term.items()}
    weight = options.pop("weight", 1.0)
    target = options.pop("_target_", name)
    if not (isinstance(weight, Real) and math.isfinite(weight)):
        raise ValueError(f"{where}.weight={weight!r} must be a finite number")
    try:
        reward_class = load_class(PACKAGE, target, Reward)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    check_options(reward_class, options, where, others=("weight", "_target_"))
    reward: Reward = build(reward_class, options, where)
    check_choice(f"{where}: {type(reward).__name__}.kind", reward.kind, KINDS)
    keys = [name, *(f"{name}/{part_name}" for part_name in reward.part_names)]
    return Term(reward=reward, weight=float(weight), keys=keys)
