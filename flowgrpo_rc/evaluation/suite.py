"""A suite: prompts of its own with a reward of its own, that a model is asked beside its training.

It is a small YAML file. Those of the package are in `assets/suites`; a user's own file may take one
of them as its `base` and change some keys.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from flowgrpo_rc import assets
from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.data.prompts import places_of, read_prompts
from flowgrpo_rc.files import plain_yaml
from flowgrpo_rc.plugins import check_choice, check_least, check_options, did_you_mean, in_seconds
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

    sampler: Mapping[str, object]
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
        applied = self.applied(rollout)
        read: object = applied.held_out_spec()
        names: tuple[str, ...] = (*SAMPLED, "max_sequence_length")
        if text:
            read = replace(applied, temperature=applied.val_kwargs.temperature)
            names = ("temperature", "prompt_length", "response_length")
        settings = {name: getattr(read, name) for name in names}
        sampler = {name: value for name, value in settings.items() if value is not None}
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


def read_suites(sources: Sequence[str], *kinds: str) -> list[Suite]:
    """Reads suites for a model that makes `kinds`; refuses what can be known without loading it.

    Each is the name of a bundled suite, NAME:FILE for a bundled suite with other prompts, or a
    file. The message of the ValueError names the suite.
    """
    suites = []
    useless = SAMPLED if "text" in kinds else ("temperature",)
    for source in sources:
        suite = read_suite(source, chats="text" in kinds)
        with _blaming(source):
            terms = build_terms(suite.reward)
            check_kind(terms, *kinds)
            check_needs(terms)
            keys = [f"sampler.{key}" for key in useless if key in suite.sampler]
            _refuse(f"{key} has no effect on {' and '.join(kinds)}" for key in keys)
        suites.append(suite)
    counts = Counter(suite.name for suite in suites)
    twice = [name for name, count in counts.items() if count > 1]
    _refuse(
        f"two suites are called {name!r}: give one another `name` in its file" for name in twice
    )
    return suites


def read_suite(source: str, *, chats: bool = False) -> Suite:
    """Reads a suite as `read_suites` does; does not ask whether its reward works here.

    `chats` is that of `read_prompts`.
    """
    name, _, prompts = source.partition(":")
    path = _path(source, name)
    with _blaming(source):
        content = {"name": path.stem, "seeds": 2, "by": None, "sampler": {}} | _content(path)
        if prompts:
            content["prompts"] = [Path(prompts)]
        n = content.pop("n", None)
        check_options(Suite, content, "key", others=("base", "n"))
        return _suite(content, n, chats)


def _path(source: str, name: str) -> Path:
    bundled = bundled_suites()
    if name in bundled:
        return assets.SUITES / f"{name}.yaml"
    path = Path(source).expanduser()
    if path.is_file() and path.suffix in ENDINGS:
        return path
    problem = f"there is no file {source} of a suite in {Path.cwd()}"
    if path.suffix not in ENDINGS:
        problem = (
            f"there is no suite {name!r}{did_you_mean(name, bundled)}; there are "
            f"{', '.join(bundled)}, or give a file that ends in {' or '.join(ENDINGS)}"
        )
    raise ValueError(problem)


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
    check_choice("base", str(base), bundled_suites())
    whole = _content(assets.SUITES / f"{base}.yaml")
    if isinstance(content.get("sampler"), Mapping):
        content["sampler"] = whole.get("sampler", {}) | content["sampler"]
    return whole | content


def _suite(content: dict[str, Any], n: object, chats: bool) -> Suite:
    """Makes a suite of the keys of its file; `n` says how many of its prompts are asked."""
    _refuse(_faults(content, n))
    files = content["prompts"]
    reward = RewardConfig(**in_seconds("reward", content["reward"]))
    terms = build_terms(reward)
    groupwise = [name for name, term in terms.items() if term.reward.groupwise]
    words = "compares a group, and a suite scores samples alone"
    _refuse(f"reward.terms.{name} {words}" for name in groupwise)
    needs_target = requires_target(terms)
    prompts = read_prompts(files, require_target=needs_target, key="prompts", chats=chats)
    check_prompts(terms, prompts, partial(places_of, files, "prompts"))
    if isinstance(n, int) and n < len(prompts):
        # From all over the file, since one category may follow another.
        prompts = [prompts[i * len(prompts) // n] for i in range(n)]
    check_least("prompts for an interval", len(prompts), _LEAST_PROMPTS)
    by = content["by"]
    lacking = [prompt for prompt in prompts if by is not None and by not in prompt.metadata]
    _refuse(
        f"by: {by!r} is no field of {prompt_name(prompt)}, which has "
        f"{', '.join(prompt.metadata) or 'none'}"
        for prompt in lacking
    )
    sampler = {
        key: _number(key)(value) for key, value in content["sampler"].items() if value is not None
    }
    return Suite(**content | {"prompts": prompts, "reward": reward, "sampler": sampler})


def _faults(content: Mapping[str, Any], n: object) -> Iterator[str]:
    """Yields what is wrong with the values of a suite's file."""
    name = content["name"]
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        yield f"name: {name!r} must be letters, digits, - and _ alone"
    for key, count in (("seeds", content["seeds"]), ("n", 1 if n is None else n)):
        if type(count) is not int or count < 1:
            yield f"{key}: {count!r} must be a whole number of at least 1"
    sampler = content["sampler"]
    if not isinstance(sampler, Mapping):
        yield f"sampler: {sampler!r} must be keys of rollout.val_kwargs"
    for key, value in sampler.items():
        number = _number(key)
        if key not in (*SAMPLED, "temperature"):
            yield f"sampler.{key}: unknown{did_you_mean(str(key), SAMPLED)}"
        if type(value) not in (int, number, type(None)):
            yield f"sampler.{key}: {value!r} must be a number ({number.__name__})"
        check_least(f"sampler.{key}", value, LEAST.get(f"val_kwargs.{key}", 0))
    reward = content["reward"]
    if not isinstance(reward, Mapping) or not isinstance(reward.get("terms"), Mapping):
        yield (
            f"reward: {reward!r} must be as the section `reward` of a run, such as "
            "{terms: {ocr: {weight: 1.0}}}"
        )
    for name in _TAKEN & reward["terms"].keys():
        yield (
            f"reward.terms.{name}: a metric of every suite is called {name!r}; give the term "
            "another name, and the reward as its _target_"
        )
    check_options(RewardConfig, reward, "reward")


def _number(key: object) -> type[int] | type[float]:
    return int if key in SAMPLED[:4] else float


def _refuse(faults: Iterable[str]) -> None:
    """Raises ValueError with the first of the faults, if there are any."""
    for fault in faults:
        raise ValueError(fault)


@contextmanager
def _blaming(source: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError) as error:
        why = "a value has the wrong type: " if isinstance(error, TypeError) else ""
        raise ValueError(f"suite {source}: {why}{error}") from error
