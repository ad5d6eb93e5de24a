"""Checks what a judge reads in an answer, and what it does about one that it cannot read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.rewards.http.client import ServerError
from flowgrpo_rc.rewards.vlm.judge import Judge, failure_of
from flowgrpo_rc.rewards.vlm.models import Answer, Question, Vlm

QUESTION = Question(pictures=[], text="how good?")
NAMES = ("prompt", "target", "low", "high")


def judge_of(vlm: Vlm, question: str = "how good?", **options: Any) -> Judge:
    settings = {"parse": "number", "low": 0, "high": 10, "attempts": 1} | options
    return Judge(vlm, question, NAMES, **settings)


class Says(Vlm):
    """Says what it was given, one list of answers for each time it is asked."""

    def __init__(self, *times: Sequence[str | Answer | ServerError]) -> None:
        self.times = list(times)
        self.heard: list[Sequence[Question]] = []

    def check(self):
        """Needs nothing."""

    def answer(self, questions):
        self.heard.append(questions)
        said = self.times[len(self.heard) - 1]
        return [Answer(answer, False) if isinstance(answer, str) else answer for answer in said]


def judged(parse: str, said: str, *, low: float = 0, high: float = 10) -> float:
    judge = judge_of(Says([said]), parse=parse, low=low, high=high)
    return judge.ask([QUESTION])[0].number


@pytest.mark.parametrize(
    ("parse", "said", "number"),
    [
        ("number", "7", 7),
        ("number", "I see 2 dogs.\n**Score: 8.5**", 8.5),
        ("number", "7/10", 7),
        ("number", "7.5 out of 10.", 7.5),
        ("number", "10/10", 10),
        ("number", "8 on a scale of 0 to 10", 8),
        ("number", "(0-10): 3", 3),
        ("number", "+4", 4),
        ("number", "3/5", math.nan),
        ("number", "", math.nan),
        ("number", "good", math.nan),
        ("number", "SD3", math.nan),
        ("number", "gpt-4 is 3d, 1.5x", math.nan),
        ("number", "6-7", math.nan),
        ("number", "6,5", math.nan),
        ("number", "1,000", math.nan),
        ("number", "so, 6", 6),
        ("number", "score: 6.", 6),
        ("number", "11", math.nan),
        ("number", "-1", math.nan),
        ("number", "9" * 400, math.nan),
        ("number", "NaN", math.nan),
        ("number", "\u0663", math.nan),
        (r"regex:Score: (\S+)", "Score: 3, no, Score: 4", 4),
        (r"regex:Score: (\S+)", "4", math.nan),
        (r"regex:Score: (\S+)", "Score: four", math.nan),
        (r"regex:Score: (\S+)", "Score: nan", math.nan),
        (r"regex:Score:( \d)?", "Score:", math.nan),
        ("json:score", 'So {x} it is: {"why": {"score": 1}, "score": 6} 9', 6),
        ("json:score", '```json\n{"score": 6.5}\n```', 6.5),
        ("json:score", '{"score": 2} {"score": 5} {"other": 1}', 5),
        ("json:score", '{"score": "6"}', math.nan),
        ("json:score", '{"score": true}', math.nan),
        ("json:score", '{"score": NaN}', math.nan),
        ("json:score", '{"score": ' + "9" * 400 + "}", math.nan),
        ("json:score", '{"score": 6', math.nan),
        ("json:score", "{" * 30_000, math.nan),
        ("json:score", '{"a":' * 30_000, math.nan),
        ("json:score", "6", math.nan),
    ],
)
def test_the_number_in_an_answer(parse: str, said: str, number: float) -> None:
    assert judged(parse, said) == pytest.approx(number, nan_ok=True)


def test_both_ends_of_the_scale_count() -> None:
    assert [judged("number", said, low=-1, high=1) for said in ("-1", "1", "0")] == [-1, 1, 0]
    assert math.isnan(judged("number", "1.01", low=-1, high=1))


def test_it_asks_again_in_the_same_conversation_and_only_what_it_could_not_read() -> None:
    vlm = Says(
        ["5", "nice", ServerError("gone"), Answer("12 or", True), "very nice"], ["6", "7", "great"]
    )
    verdicts = judge_of(vlm, attempts=2).ask([QUESTION] * 5)
    assert [verdict.repeats for verdict in verdicts] == [0, 1, 0, 1, 1]
    assert [verdict.number for verdict in verdicts] == pytest.approx(
        [5, 6, math.nan, 7, math.nan], nan_ok=True
    )
    assert [len(heard) for heard in vlm.heard] == [5, 3]
    assert [question.turns[0][0] for question in vlm.heard[1]] == ["nice", "12 or", "very nice"]
    assert "a number from 0 to 10" in vlm.heard[1][0].turns[0][1]
    assert vlm.heard[1][0].text == QUESTION.text
    assert verdicts[2].failure == "gone"
    assert verdicts[4].failure == "no number: 'great'"
    assert failure_of(verdicts) == "2 of 5 questions have no answer that counts: gone"
    assert failure_of(verdicts[:2]) == ""


def test_a_cut_answer_does_not_count() -> None:
    (verdict,) = judge_of(Says([Answer("5 dogs", True)])).ask([QUESTION])
    assert math.isnan(verdict.number)
    assert "max_tokens" in verdict.failure


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"parse": "last"},
            r"parse='last': give number, json:KEY, or regex:PATTERN with one group",
        ),
        ({"parse": "json:"}, r"parse='json:': give"),
        ({"parse": "regex:("}, r"parse='regex:\(' cannot be read: missing \), unterminated"),
        ({"parse": "regex:(a)(b)"}, r"parse='regex:\(a\)\(b\)': give .* with one group"),
        ({"low": 10}, r"low=10 and high=10: low must be below high"),
        ({"high": math.inf}, r"high=inf"),
        ({"attempts": 0}, r"attempts=0: give a whole number of at least 1"),
        ({"question": "{promt}"}, r"question: .* in braces='promt': allowed are prompt, target"),
    ],
)
def test_wrong_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        judge_of(Says(), **options)


def test_the_text_of_a_question() -> None:
    judge = judge_of(Says(), 'Say {"score": 1} for {prompt}, not {}, of {high}')
    prompt = Prompt(text="a {target}", index=0)
    assert judge.text(prompt) == 'Say {"score": 1} for a {target}, not {}, of 10'
