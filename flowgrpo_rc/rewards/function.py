"""A plain function as a reward, for what needs no class."""

import inspect
import re
import sys
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.plugins import load_function
from flowgrpo_rc.rewards.base import Reward, Scores

# Returns a number, or None for a sample that it cannot score; of all samples, a list of them.
Score = Callable[..., Any]
GIVEN = "given:"
# What parameters of one sample are called, and those of all samples at once.
_ONE = ("prompt", "sample", "image", "video", "completion", "response", "latent")
_EVERY = tuple(f"{name}s" for name in _ONE)
# What the second of two parameters may also be called to be the prompt.
_PROMPT = re.compile(r"\w|_\w*|\w*prompt\w*|text|caption")
_BY_POSITION = inspect.signature(lambda sample, prompt: 0)
_given: dict[str, Score] = {}


class Function(Reward):
    """The number that `score(sample, prompt)` returns for each sample and its `Prompt`.

    A sample is a uint8 image [H, W, 3], a uint8 video [F, H, W, 3] or a text; with kind=latent it
    is the tensor that would be decoded. A sample whose number is None or not finite has no reward.
    If the function raises, the whole chunk of samples has none.

    Parameters are given what they are called, in any order: a sample is `image`, `completion` and
    so on, and other names are columns of the prompt file. `images` or `completions`, `prompts` and
    columns beside them are lists of all samples, as in TRL; the function then returns a list.

    Args:
      path: `my_package.my_module:score`; the module is imported at once. Or `given:NAME` for what
        `give` took.
      kind: "image", "video", "text" or "latent" for a function that scores nothing else.
    """

    def __init__(self, *, path: str, kind: str = "any") -> None:
        self.kind = kind
        self.score: Score = _given_at(path) if path.startswith(GIVEN) else load_function(path)
        self._signature = _signature(self.score)
        self._where = f"path={path!r} takes {self._signature}"
        parameters = [p for p in self._signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        self._required = [p.name for p in parameters if p.default is p.empty]
        single_names, batch_names = (
            [n for n in self._required if n in names] for names in (_ONE, _EVERY)
        )
        samples = [name for name in single_names + batch_names if not name.startswith("prompt")]
        first_two = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY][:2]
        self._second: str | None = None  # the prompt, unless a column is called so
        if not batch_names and len(first_two) == 2 and {*self._required} <= {*first_two}:
            samples = samples or [name for name in first_two[:1] if name != "prompt"]
            self._second = first_two[1] if _PROMPT.fullmatch(first_two[1]) else None
        if len(samples) != 1 or (single_names and batch_names):
            raise ValueError(
                f"{self._where}; it is called with a sample and its prompt, or by name: one of "
                f"{', '.join(_ONE[1:])}, and prompt; or these with an s, for all samples at once"
            )
        self._sample = samples[0]
        self._at_once = bool(batch_names)
        self._second_is_column: bool | None = None

    def check_prompt(self, prompt: Prompt) -> None:
        """Raises ValueError if a parameter is called like nothing that there is for the prompt."""
        self._arguments([None], [prompt])

    def __call__(self, samples: Any, prompts: Sequence[Prompt]) -> Scores:
        if self._at_once:
            return Scores(values=self._call(samples, prompts))
        pairs = zip(samples, prompts, strict=True)
        return Scores(values=[self._call([sample], [prompt]) for sample, prompt in pairs])

    def _call(self, samples: Sequence[object], prompts: Sequence[Prompt]) -> Any:
        arguments = self._arguments(samples, prompts)
        return self.score(*arguments.args, **arguments.kwargs)

    def _arguments(
        self, samples: Sequence[object], prompts: Sequence[Prompt]
    ) -> inspect.BoundArguments:
        """Returns what one call gets: for all samples, or for the only one."""
        rows = [_columns(prompt) for prompt in prompts]
        columns: dict[str, object] = rows[0]
        values: dict[str, object] = {"prompt": prompts[0], self._sample: samples[0]}
        if self._at_once:
            columns = {name: [row.get(name) for row in rows] for row in rows for name in row}
            said = [list(prompt.messages) or prompt.text for prompt in prompts]
            if self._sample == "completions":
                samples = [
                    [{"role": "assistant", "content": sample}] if prompt.messages else sample
                    for sample, prompt in zip(samples, prompts, strict=True)
                ]
            values = {"prompts": said, self._sample: samples}
        elif self._second is not None:
            is_column = self._second in columns
            if self._second_is_column not in (None, is_column):
                raise ValueError(f"{self._where}: only some prompts have a column {self._second}")
            self._second_is_column = is_column
            columns.setdefault(self._second, prompts[0])
        arguments = columns | values
        for name in self._required:
            if name not in values and not all(name in row for row in rows):
                known = ", ".join(arguments)
                raise ValueError(
                    f"{self._where}: no column of the prompts is called {name}; there are {known}"
                )
        parameters = self._signature.parameters.values()
        named = {p.name: arguments.pop(p.name) for p in parameters if p.name in arguments}
        named |= {p.name: arguments for p in parameters if p.kind is p.VAR_KEYWORD}
        return inspect.BoundArguments(self._signature, named)


def give(name: str, score: Score) -> str:
    """Makes a function of this Python session a reward, and returns its path for `Function`.

    A function of a module is found there again by every process. Any other one, such as that of a
    notebook's cell, is kept for this session alone.
    """
    if not callable(score):
        raise ValueError(
            f"rewards[{name!r}]={score!r} is no function, such as f(sample, prompt), and no "
            f'mapping, such as {{"ocr": {{"weight": 1}}}}; the weight of a function is the setting '
            f"reward.terms.{name}.weight"
        )
    if (
        isinstance(score, FunctionType)
        and score.__module__ not in ("__main__", None)
        and vars(sys.modules[score.__module__]).get(score.__name__) is score
    ):
        return f"{score.__module__}:{score.__name__}"
    _given[name] = score
    return f"{GIVEN}{name}"


def _given_at(path: str) -> Score:
    name = path.removeprefix(GIVEN)
    if name not in _given:
        raise ValueError(
            f"path={path!r}: this reward is a function of the Python session that started the run: "
            f"train, evaluate and Run.resume take rewards={{{name!r}: the function}}"
        )
    return _given[name]


def _columns(prompt: Prompt) -> dict[str, object]:
    return {**prompt.metadata, **({} if prompt.target is None else {"target": prompt.target})}


def _signature(score: Score) -> inspect.Signature:
    """Returns the parameters of a function; sample and prompt if it does not tell them."""
    try:
        signature = inspect.signature(score)
    except ValueError:  # functions in C need not have a signature
        return _BY_POSITION
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    return _BY_POSITION if inspect.Parameter.VAR_POSITIONAL in kinds else signature
