"""A suite: prompts of its own with a reward of its own, that a model is asked beside its training.

It is a small YAML file. Those of the package are in `assets/suites`; a user's own file may take one
of them as its `base` and change some keys.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from flowgrpo_rc import assets
from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.data.prompts import places_of, read_prompts
from flowgrpo_rc.files import plain_yaml
from flowgrpo_rc.plugins import check_least, check_options, did_you_mean, in_seconds
from flowgrpo_rc.rewards.base import prompt_name
from flowgrpo_rc.rewards.manager import (
    RewardConfig,
    build_terms,
    check_kind,
    check_needs,
    check_prompts,
    requires_target,
)
from flowgrpo_rc.rollout.config import LEAST, SAMPLED, RolloutConfig

ENDINGS = (".yaml", ".yml")
HOW_TO_CHANGE = "change `sampler` in its file, or in a file of yours with `base: {}`"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_LEAST_PROMPTS = 2  # an interval needs a spread
# Options of rewards that say where and how fast they score.
_OF_MACHINES = {"url", "api_key", "device", "batch_size", "timeout_s"}
_TAKEN = {"reward", "change", "change_low", "change_high", "failed_fraction"}


class SuiteProtocol(NamedTuple):
    """Holds how the samples of a suite are made; two of its numbers compare if digests are equal.

    `sampler` has size, steps and guidance as they count, or temperature and lengths of text. The
    digest also covers prompts, samples of each, and rewards, without addresses and devices.
    """

    sampler: Mapping[str, Any]
    digest: str

    def told(self) -> str:
        """Returns the protocol in words."""
        return ", ".join([self.digest, *(f"{key} {value}" for key, value in self.sampler.items())])


@dataclass(frozen=True, kw_only=True, slots=True)
class Suite:
    """A question that is asked of a model: how well does it do on these prompts?"""

    name: str
    prompts: Sequence[Prompt]
    reward: RewardConfig
    seeds: int  # samples of each prompt; sample k starts from the same noise in all runs
    by: str | None  # field of the prompt file whose values split the result
    sampler: Mapping[str, Any] = field(default_factory=dict)  # in place of rollout.val_kwargs

    def applied(self, rollout: RolloutConfig) -> RolloutConfig:
        """Returns the settings of a run, with the suite's own sampler in its evaluation."""
        return replace(rollout, val_kwargs=replace(rollout.val_kwargs, **self.sampler))

    def protocol(self, rollout: RolloutConfig, *, text: bool) -> SuiteProtocol:
        """Returns how a run asks the suite; `text` of a language model."""
        own = self.applied(rollout)
        names: tuple[str, ...] = (*SAMPLED, "max_sequence_length")
        read: Any = own.held_out_spec()
        if text:
            names = ("temperature", "prompt_length", "response_length")
            read = replace(own, temperature=own.val_kwargs.temperature)
        found = {name: getattr(read, name) for name in names}
        sampler = {name: value for name, value in found.items() if value is not None}
        terms = {
            name: {key: value for key, value in term.items() if key not in _OF_MACHINES}
            for name, term in self.reward.terms.items()
            if term is not None
        }
        content = [sampler, self.seeds, terms, [asdict(prompt) for prompt in self.prompts]]
        written = json.dumps(content, sort_keys=True, default=str).encode()
        return SuiteProtocol(sampler, hashlib.sha256(written).hexdigest()[:8])

    def groups(self) -> list[str]:
        """Returns the value of `by` of each prompt; empty without it."""
        return [str(prompt.metadata[self.by]) for prompt in self.prompts if self.by is not None]


def bundled_suites() -> list[str]:
    """Returns the names of the suites that the package has."""
    return sorted(path.stem for path in assets.SUITES.glob("*.yaml"))


def read_suites(given: Sequence[str], *kinds: str) -> list[Suite]:
    """Reads suites for a model that makes `kinds`; refuses what can be known without loading it.

    Each is the name of a bundled suite, NAME:FILE for a bundled suite with other prompts, or a
    file. The message of the ValueError names the suite.
    """
    suites = []
    for text in given:
        suite = read_suite(text, chats="text" in kinds)
        with _blaming(text):
            terms = build_terms(suite.reward)
            check_kind(terms, *kinds)
            check_needs(terms)
            for key in SAMPLED if "text" in kinds else ("temperature",):
                if key in suite.sampler:
                    raise ValueError(f"sampler.{key} has no effect on {' and '.join(kinds)}")
        suites.append(suite)
    for name, count in Counter(suite.name for suite in suites).items():
        if count > 1:
            raise ValueError(f"two suites are called {name!r}: give one another `name` in its file")
    return suites


def read_suite(given: str, *, chats: bool = False) -> Suite:
    """Reads a suite as `read_suites` does; does not ask whether its reward works here.

    `chats` is that of `read_prompts`.
    """
    name, _, prompts = given.partition(":")
    path = _path(given, name)
    with _blaming(given):
        content = {"name": path.stem, "seeds": 2, "n": None, "by": None} | _content(path)
        if prompts:
            content["prompts"] = [Path(prompts)]
        n = content.pop("n")
        check_options(Suite, content, "key", others=("base", "n"))
        return _suite(content, n, chats)


def _path(given: str, name: str) -> Path:
    if name in bundled_suites():
        return assets.SUITES / f"{name}.yaml"
    path = Path(given).expanduser()
    if path.suffix not in ENDINGS:
        raise ValueError(
            f"there is no suite {name!r}{did_you_mean(name, bundled_suites())}; there are "
            f"{', '.join(bundled_suites())}, or give a file that ends in {' or '.join(ENDINGS)}"
        )
    if not path.is_file():
        raise ValueError(f"there is no file {given} of a suite in {Path.cwd()}")
    return path


def _content(path: Path) -> dict[str, Any]:
    """Returns the keys of a suite's file and those of its base, with whole paths of prompts."""
    content: dict[str, Any] = {str(key): value for key, value in plain_yaml(path).items()}
    base = content.pop("base", None)
    if "prompts" in content:
        listed = content["prompts"]
        files = listed if isinstance(listed, list) else [listed]
        content["prompts"] = [path.parent / Path(str(file)).expanduser() for file in files]
    if base is None:
        return content
    if str(base) not in bundled_suites():
        raise ValueError(f"base: {base!r} is none of {', '.join(bundled_suites())}")
    whole = _content(assets.SUITES / f"{base}.yaml")
    if isinstance(content.get("sampler"), Mapping):
        content["sampler"] = whole.get("sampler", {}) | content["sampler"]
    return whole | content


def _suite(content: dict[str, Any], n: Any, chats: bool) -> Suite:
    """Makes a suite of the keys of its file; `n` says how many of its prompts are asked."""
    name, files, by = content["name"], content["prompts"], content["by"]
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"name: {name!r} must be letters, digits, - and _ alone")
    for key, value in (("seeds", content["seeds"]), ("n", n)):
        if not (value is None and key == "n") and (type(value) is not int or value < 1):
            raise ValueError(f"{key}: {value!r} must be a whole number of at least 1")
    content["sampler"] = _sampler(content.get("sampler", {}))
    reward = _reward(content["reward"])
    terms = build_terms(reward)
    for term_name, term in terms.items():
        if term.reward.groupwise:
            raise ValueError(
                f"reward.terms.{term_name} compares a group, and a suite scores samples alone"
            )
    needs_target = requires_target(terms)
    prompts = read_prompts(files, require_target=needs_target, key="prompts", chats=chats)
    check_prompts(terms, prompts, partial(places_of, files, "prompts"))
    if n is not None and n < len(prompts):
        # From all over the file, since one category may follow another.
        prompts = [prompts[i * len(prompts) // n] for i in range(n)]
    if len(prompts) < _LEAST_PROMPTS:
        raise ValueError(f"{len(prompts)} prompt: an interval needs at least {_LEAST_PROMPTS}")
    for prompt in prompts:
        if by is not None and by not in prompt.metadata:
            fields = ", ".join(prompt.metadata) or "none"
            named = prompt_name(prompt)
            raise ValueError(f"by: {by!r} is no field of {named}, which has {fields}")
    return Suite(**content | {"prompts": prompts, "reward": reward})


def _sampler(given: Any) -> dict[str, Any]:
    """Returns the keys of a suite's sampler, as whole or other numbers, without null."""
    if not isinstance(given, Mapping):
        raise ValueError(f"sampler: {given!r} must be keys of rollout.val_kwargs")
    found = {}
    for key, value in given.items():
        if key not in (*SAMPLED, "temperature"):
            raise ValueError(f"sampler.{key}: unknown{did_you_mean(str(key), SAMPLED)}")
        number = int if key in SAMPLED[:4] else float
        if type(value) not in (int, number, type(None)):
            raise ValueError(f"sampler.{key}: {value!r} must be a number ({number.__name__})")
        check_least(f"sampler.{key}", value, LEAST.get(f"val_kwargs.{key}", 0))
        if value is not None:
            found[str(key)] = number(value)
    return found


def _reward(given: Any) -> RewardConfig:
    if not isinstance(given, Mapping) or not isinstance(given.get("terms"), Mapping):
        raise ValueError(
            f"reward: {given!r} must be as the section `reward` of a run, such as "
            "{terms: {ocr: {weight: 1.0}}}"
        )
    for name in given["terms"]:
        if name in _TAKEN:
            raise ValueError(
                f"reward.terms.{name}: a metric of every suite is called {name!r}; give the term "
                "another name, and the reward as its _target_"
            )
    check_options(RewardConfig, given, "reward")
    return RewardConfig(**in_seconds("reward", given))


@contextmanager
def _blaming(given: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ValueError(f"suite {given}: {error}") from error
    except TypeError as error:
        raise ValueError(f"suite {given}: a value has the wrong type: {error}") from error
