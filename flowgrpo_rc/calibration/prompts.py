"""Checks whether the engine conditions on the prompts as they are, whitespace included.

Training prompts need not have whitespace that an engine could change, so one prompt is sampled with
whitespace planted in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.calibration.measure import RecordedRollout
from flowgrpo_rc.models.base import FlowModel
from flowgrpo_rc.monitoring.conditioning import conditioning_error
from flowgrpo_rc.monitoring.health_rules import OTHER_PROMPT

# What is done to a text -> how.
CHANGES: Mapping[str, Callable[[str], str]] = {
    "stripped": str.strip,
    "whitespace collapsed": lambda text: " ".join(text.split()),
    "newlines turned to spaces": lambda text: text.replace("\n", " "),
    "newlines left out": lambda text: text.replace("\n", ""),
    "lower case": str.lower,
}


def planted(prompt: Prompt) -> Prompt:
    """Returns a short prompt that every change of `CHANGES` to whitespace changes.

    Args:
      prompt: a prompt of the run; its text is replaced.
    """
    return replace(prompt, text="  a  b\nc \n")


def changed(prompts: Sequence[Prompt], change: Callable[[str], str]) -> list[Prompt] | None:
    """Returns prompts with changed texts; None if the change leaves all of them as they are."""
    texts = [change(prompt.text) for prompt in prompts]
    if all(text == prompt.text for text, prompt in zip(texts, prompts, strict=True)):
        return None
    return [replace(prompt, text=text) for text, prompt in zip(texts, prompts, strict=True)]


def sampled_prompts(rollout: RecordedRollout) -> list[Prompt]:
    """Returns the prompt of each recorded sample."""
    return [rollout.request.prompt_of(row) for row in range(len(rollout.batch))]


def check_conditioning(rollout: RecordedRollout, model: FlowModel) -> str | None:
    """Compares the recorded conditioning with what the trainer's encoders make of the prompts.

    An engine that encodes itself may record the conditioning of another text. That makes no
    mismatch.

    Args:
      rollout: recorded samples.
      model: the trainer's model.

    Returns:
      What was done to the texts, in words; None if they are as they were.
    """
    prompts = sampled_prompts(rollout)

    def differs(others: Sequence[Prompt]) -> bool:
        return bool(conditioning_error(model, rollout.batch, others).max() > OTHER_PROMPT)

    if not differs(prompts):
        return None
    for name, change in CHANGES.items():
        others = changed(prompts, change)
        if others is not None and not differs(others):
            return name
    return "changed in a way that is not known here, or encoded by another text encoder"
