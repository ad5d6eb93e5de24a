"""Rewards that ask a vision-language model, and a judge that reads its answers as numbers.

An answer in which no number can be found is a failure. The judge is asked again, in the same
conversation, and in the end the question has no number. It never becomes 0.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import NamedTuple

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.plugins import build, check_choice
from flowgrpo_rc.reading import blaming
from flowgrpo_rc.rewards.base import Reward, check_range, finite_numbers
from flowgrpo_rc.rewards.http.client import ServerError
from flowgrpo_rc.rewards.vlm.models import Answer, LocalVlm, Question, Vlm, VlmServer

LONGEST_ANSWER = 20_000  # characters of an answer that are read, from its end
LONGEST_QUOTE = 100  # characters of an answer in a message
MOST_BRACES = 100  # in an answer, at which a JSON object is looked for
# Not a part of a word, such as SD3 or gpt-4o, nor an end of a range or of 7,5 and 1,000.
_NUMBER = r"(?<![\w.])(?<![\w.]-)(?<![0-9],)[-+]?[0-9]+(?:\.[0-9]+)?(?!\w|[.,][0-9]|-[0-9])"
_SHARE = re.compile(rf"({_NUMBER})(?:\s*(?:/|out of)\s*({_NUMBER}))?")
_RANGE = re.compile(r"(-?[0-9]+(?:\.[0-9]+)?)\s*(?:to|and|-|\u2013)\s*(-?[0-9]+(?:\.[0-9]+)?)")
_PLACE = re.compile(r"\{(\w+)\}")

# Returns the number of an answer, or why there is none.
Read = Callable[[str], float | str]


class AsksVlm(Reward):
    """A reward that asks a model: a `VlmServer`, if `url` is given, or a `LocalVlm` at `path`."""

    def __init__(self, vlm: Mapping[str, object]) -> None:
        if ("url" in vlm) == ("path" in vlm):
            raise ValueError("which model answers? Give url and model for a server, or path")
        self._vlm: Vlm
        if "url" in vlm:
            self._vlm = build(VlmServer, vlm, "a VLM's server")
        else:
            self._vlm = build(LocalVlm, vlm, "a VLM of this process")

    def check(self) -> None:
        """Raises ValueError if the model of this process cannot be had."""
        self._vlm.check()


class Verdict(NamedTuple):
    """The outcome of a question."""

    number: float  # NaN if nothing could be read
    repeats: int  # how often it was asked again
    failure: str = ""  # why there is no number


@dataclass(eq=False, repr=False)
class Judge:
    """Asks a model a question of its own about each prompt, whose answer is a number.

    `parse` says where in an answer the number is. `number`: the last one; 7/10 and "7 out of 10"
    are 7. `regex:PATTERN`: the group of the last match. `json:KEY`: the value of KEY in the last
    JSON object that has it.
    """

    vlm: Vlm
    question: str  # with the names of `known` in braces where their values should stand
    known: Sequence[str]  # among `prompt`, `target`, `low` and `high`
    _: KW_ONLY
    parse: str
    low: float  # the least number that counts as an answer
    high: float  # the largest
    attempts: int  # how often a question is asked at most, if its answer cannot be read

    def __post_init__(self) -> None:
        for name in _PLACE.findall(self.question):
            check_choice("question: what stands in braces", name, self.known)
        if not -math.inf < self.low < self.high < math.inf:
            raise ValueError(f"low={self.low!r} and high={self.high!r}: low must be below high")
        check_range(1, attempts=self.attempts)
        self._read, form = _reader(self.parse, self.low, self.high)
        self._reply = f"That could not be read. Answer with {form} and nothing else."

    def text(self, prompt: Prompt) -> str:
        """Returns the question about a prompt, with its values in place of the names in braces."""
        values = {
            "prompt": prompt.text,
            "target": prompt.target or "",
            "low": f"{self.low:g}",
            "high": f"{self.high:g}",
        }
        return _PLACE.sub(lambda match: values[match[1]], self.question)

    def ask(self, questions: Sequence[Question]) -> list[Verdict]:
        """Asks N questions, and again those whose answers cannot be read.

        A question that has no answer at all is not asked again: a server's client has done so.
        """
        verdicts = [Verdict(math.nan, 0)] * len(questions)
        current = dict(enumerate(questions))
        for repeats in range(self.attempts):
            answers = self.vlm.answer(list(current.values()))
            unreadable = {}
            for (index, question), answer in zip(list(current.items()), answers, strict=True):
                verdicts[index] = self._judge(answer, repeats)
                if verdicts[index].failure and isinstance(answer, Answer):
                    turn = answer.text[-LONGEST_ANSWER:], self._reply
                    unreadable[index] = replace(question, turns=(*question.turns, turn))
            current = unreadable
            if not current:
                break
        return verdicts

    def _judge(self, answer: Answer | ServerError, repeats: int) -> Verdict:
        if isinstance(answer, ServerError):
            return Verdict(math.nan, repeats, str(answer))
        if answer.is_cut:
            return Verdict(math.nan, repeats, "the answer was cut at max_tokens; raise it")
        number = self._read(answer.text[-LONGEST_ANSWER:])
        if isinstance(number, float):
            if self.low <= number <= self.high:
                return Verdict(number, repeats)
            number = f"not between low={self.low:g} and high={self.high:g}"
        return Verdict(math.nan, repeats, f"{number}: {answer.text[:LONGEST_QUOTE]!r}")


def failure_of(verdicts: Sequence[Verdict]) -> str:
    """Returns why the first question without a number has none; empty if all have one."""
    failures = [verdict.failure for verdict in verdicts if verdict.failure]
    if not failures:
        return ""
    return f"{len(failures)} of {len(verdicts)} questions have no answer that counts: {failures[0]}"


def _reader(parse: str, low: float, high: float) -> tuple[Read, str]:
    """Returns what reads an answer, and the form of it in words."""
    kind, _, rest = parse.partition(":")
    between = f"a number from {low:g} to {high:g}"
    if parse == "number":
        return lambda text: _last_number(text, low, high), between
    if kind == "json" and rest:
        return lambda text: _json_value(text, rest), f'a JSON object with {between} at "{rest}"'
    if kind == "regex":
        with blaming(f"parse={parse!r}"):
            pattern = re.compile(rest)
        if pattern.groups == 1:
            return lambda text: _matched(text, pattern), f"{between} in the form that was asked for"
    raise ValueError(
        f"parse={parse!r}: give number, json:KEY, or regex:PATTERN with one group for the number"
    )


def _last_number(text: str, low: float, high: float) -> float | str:
    # "7 on a scale from 0 to 10" is 7.
    for scale in _RANGE.finditer(text):
        if [float(end) for end in scale.groups()] == [low, high]:
            text = text.replace(scale[0], "")
    shares = [*_SHARE.finditer(text)]
    if not shares:
        return "no number"
    number, whole = shares[-1].groups()
    if whole is not None and float(whole) != high:
        return f"not out of high={high:g}"
    return float(number)


def _matched(text: str, pattern: re.Pattern[str]) -> float | str:
    matches = [*pattern.finditer(text)]
    try:
        return float(matches[-1][1])
    except (IndexError, TypeError, ValueError):
        return "the pattern of parse matches no number"


def _json_value(text: str, key: str) -> float | str:
    decoder = json.JSONDecoder()
    number = None
    end = 0
    for _ in range(MOST_BRACES):
        start = text.find("{", end)
        if start < 0:
            break
        try:
            value, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            end = start + 1
        else:
            number = value.get(key, number)
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        return f"no JSON object with a number at {key!r}"
    (finite,) = finite_numbers([number])
    return finite
