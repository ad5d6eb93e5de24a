"""The contract of a reward, of this package or of yours.

Shapes: N samples, F frames of a video, H x W pixels.
"""

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from decimal import Decimal
from numbers import Real
from typing import Any

import numpy as np
from torch import Tensor

from flowgrpo_rc.batch import Prompt

KINDS = ("image", "video", "text", "latent", "any")
Samples = np.ndarray | Sequence[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """The scores of N samples.

    A sample that could not be scored has the value NaN. It then leaves the batch, whereas a score
    of 0 would teach the policy something.

    Attributes:
      values: one number per sample.
      parts: name -> a further number per sample, which is logged and not optimized.
      failure: why some samples have no score, for the log; may be empty.
    """

    values: Sequence[float]
    parts: Mapping[str, Sequence[float]] = field(default_factory=dict)
    failure: str = ""


def finite_numbers(values: object) -> list[float]:
    """Returns the numbers of a reward as floats; None and what is not finite become NaN.

    A number is one of Python, or a scalar, array or tensor of NumPy or torch that holds just one.
    TypeError for what is no list of them: it has no order, holds letters, or is one number.
    """
    listed = values.tolist() if isinstance(values, (np.ndarray, Tensor)) else values
    if isinstance(listed, (Mapping, Set, str, bytes)) or not isinstance(listed, Iterable):
        raise TypeError(f"scores must be a list, array or tensor, not a {type(listed).__name__}")
    return [_number(value) for value in listed]


def _number(value: object) -> float:
    if isinstance(value, (np.ndarray, np.generic, Tensor)) and math.prod(value.shape) == 1:
        value = value.item()
    try:
        number = float(value) if isinstance(value, (Real, Decimal)) else math.nan
    except OverflowError:  # a whole number of Python may be larger than any float
        return math.nan
    return number if math.isfinite(number) else math.nan


def check_range(least: float, most: float = math.inf, **options: object) -> None:
    """Raises ValueError for an option that is no finite number from `least` to `most`.

    If `least` is a whole number, the options have to be, too.
    """
    kinds = (int,) if isinstance(least, int) else (int, float)
    for name, value in options.items():
        if not isinstance(value, kinds) or not least <= value <= min(most, sys.float_info.max):
            kind = "a number" if float in kinds else "a whole number"
            allowed = (
                f"of at least {least:g}" if most == math.inf else f"from {least:g} to {most:g}"
            )
            raise ValueError(f"{name}={value!r}: give {kind} {allowed}")


def batches(count: int, size: int) -> list[slice]:
    """Returns slices of at most `size` that cover `count` samples in order."""
    return [slice(start, start + size) for start in range(0, count, size)]


def prompt_name(prompt: Prompt) -> str:
    """Returns what messages call a prompt."""
    return f"prompt {prompt.index} ({prompt.text!r})"


def target_of(prompt: Prompt) -> str:
    """Returns the target of a prompt. Raises ValueError if it has none."""
    if prompt.target is None or not prompt.target.strip():
        raise ValueError(
            f"{prompt_name(prompt)} has target={prompt.target!r}, and the reward needs one: put "
            'the text between double quotes, or give the key "target"'
        )
    return prompt.target


class Reward(ABC):
    """Scores samples. There is one instance per process; a thread of its own calls it.

    The constructor's keyword parameters are the options of the configuration. The constructor
    checks them and returns at once; models and other large things load at the first call. Calls to
    one reward never overlap, and fail if they take longer than `reward.timeout_s`.

    Attributes:
      kind: what it scores: "image", "video" or "text"; "any" for all three; or "latent" for the
        tensor that an image or a video is decoded from. If all rewards of a run score latents,
        training samples are not decoded.
      part_names: the keys of `Scores.parts`, declared so that every process logs the same names.
      requires_target: True if every prompt must have a target text.
      requires_images: True if every prompt must have an image.
      groupwise: True if the score of a sample depends on the others of its group, the samples of
        one prompt. A call then gets whole groups. Held-out samples, of which a prompt has one, are
        not scored.
      num_parameters: of the models that it loads onto the GPU of the trainer's process, as they are
        published; 0 for none. `flowgrpo-rc plan` counts them, each in the precision `dtype`.
    """

    kind: str = "image"
    part_names: tuple[str, ...] = ()
    requires_target: bool = False
    requires_images: bool = False
    groupwise: bool = False
    num_parameters: int = 0

    def check(self) -> None:  # noqa: B027 - most rewards need nothing
        """Raises ValueError if what it needs is missing on this machine.

        It is called before anything is loaded, and loads nothing large itself. A reward that needs
        nothing but its options need not define it.
        """

    def check_prompt(self, prompt: Prompt) -> None:  # noqa: B027 - most rewards read no metadata
        """Raises ValueError if no sample of the prompt can be scored, or none can score best.

        It is called with every prompt of a run before a model is loaded. The message need not name
        the prompt.
        """

    def settle(self, earlier: Mapping[str, object]) -> Mapping[str, object]:
        """Fills in each option that is left to this machine, and returns those options.

        `earlier` are the options of the run that goes on, which keeps what it has; empty for a run
        that begins. The run's settings record what is returned.
        """
        return {}

    @abstractmethod
    def __call__(self, samples: Any, prompts: Sequence[Prompt]) -> Scores:
        """Scores N samples.

        Args:
          samples: uint8 RGB images [N, H, W, 3] or videos [N, F, H, W, 3], a list of N texts, or
            latents [N, ...]: a tensor on the model's device, in the shape and precision in which
            the model denoises. They are a copy, as the prompts are.
          prompts: the prompt of each sample. If the reward is groupwise, they are one group.
        """
