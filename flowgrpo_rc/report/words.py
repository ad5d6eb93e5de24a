"""The words of the pages: what each means, and which page of the documentation tells more."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable
from html import escape
from typing import NamedTuple


class Word(NamedTuple):
    """An entry of the list of words.

    Attributes:
      name: the word.
      meaning: what it means.
      page: page of the documentation, without its ending.
      heading: anchor on that page; empty for the whole page.
    """

    name: str
    meaning: str
    page: str
    heading: str = ""


WORDS = {
    "reward": Word(
        "Reward",
        "The score of a sample, a weighted sum of the rewards that were set. Training rewards are "
        "those of the samples that the step trains on; held-out ones are those of prompts that are "
        "never trained on, with the same seeds at each evaluation.",
        "rewards",
    ),
    "mode": Word(
        "Mode",
        "Bypass: the old policy of the clip is the policy that sampled. Decoupled: the training "
        "graph computes the old policy again, and the correction compares it with the policy that "
        "sampled.",
        "rollout_correction",
        "two-modes",
    ),
    "clip": Word(
        "Clip",
        "A step is clipped, and trains nothing, if the ratio of current to old policy is farther "
        "than the clip from 1 on the side that the update pushes to.",
        "how_it_works",
        "the-clipped-update",
    ),
    "centered": Word(
        "Centered",
        "The log-ratio credits the noise that the rollout drew.",
        "rollout_correction",
        "the-noise-that-was-drawn",
    ),
    "suite": Word(
        "Suite",
        "Prompts and rewards of their own that the model is asked beside its training. The base "
        "model answers from the same noises. An interval that does not hold 0 is a change beyond "
        "chance.",
        "reports",
        "suites",
    ),
    "precision": Word(
        "Precision",
        "The number format of the rollout, which samples, and of the training graph. Different "
        "formats are the usual reason for a mismatch.",
        "calibration",
        "precision",
    ),
    "mismatch": Word(
        "Mismatch",
        "Log-probability of the training graph minus that of the rollout, for the same weights and "
        "the same samples, before the step's first update. It should be 0. Its scale is the noise "
        "floor; beyond the clip, clipping acts on noise.",
        "rollout_correction",
        "the-noise-floor",
    ),
    "movement": Word(
        "Policy's own movement",
        "How far the step's updates moved the log-probabilities of what is evaluated after the "
        "first of them.",
        "rollout_correction",
        "the-noise-floor",
    ),
    "weight": Word(
        "Importance weight",
        "Ratio of training to rollout probability, which the loss multiplies by if rollout_is is "
        "set.",
        "rollout_correction",
        "importance-weights-rollout_is",
    ),
    "ess": Word(
        "Effective sample size (ESS)",
        "The share of the batch that carries the gradient: 1 if all importance weights are equal.",
        "rollout_correction",
        "importance-weights-rollout_is",
    ),
    "rejection": Word(
        "Rejection",
        "A step or sample whose mismatch lies outside the band of a criterion is not trained on; a "
        "veto rejects a sample for one extreme step. auto:k is a band of k robust standard "
        "deviations about the running median.",
        "rollout_correction",
        "rejection-rollout_rs",
    ),
    "kl": Word(
        "KL",
        "Kullback-Leibler divergence. Its plain estimate, the mean of rollout minus training "
        "log-probabilities, may be negative; k3 is an estimate of the same that never is.",
        "rollout_correction",
        "metrics",
    ),
    "chi2": Word(
        "Chi-squared divergence",
        "Estimated from the ratios of training to rollout probability, of steps or of sequences; 0 "
        "if they agree.",
        "rollout_correction",
        "metrics",
    ),
    "timestep": Word(
        "Timestep",
        "The place of a step in the schedule: 1000 is pure noise, 0 the finished picture.",
        "how_it_works",
        "sampling-with-noise",
    ),
    "reference": Word(
        "KL to the reference",
        "How far the trained policy is from the base model; the loss holds it back with "
        "actor.use_kl_loss.",
        "metrics",
        "update",
    ),
    "lora": Word(
        "LoRA",
        "The small matrices that are trained beside the frozen base model.",
        "usage",
        "a-run",
    ),
}


def link(word: str | None, text: str) -> str:
    """Returns a text that leads to an entry of the list of words.

    Args:
      word: key of the entry; None for no link.
      text: what is shown; it is escaped.
    """
    if word is None:
        return escape(text)
    assert word in WORDS, word
    return f'<a class="word" href="#word-{word}">{escape(text)}</a>'


def explained(sections: Iterable[str], site: str | None) -> str:
    """Returns the list of the words that sections link to.

    Args:
      sections: HTML of the page.
      site: address of the documentation site; None if it has none, and pages are only named.
    """
    text = "".join(sections)
    entries = []
    for key, word in WORDS.items():
        if f'href="#word-{key}"' in text:
            entries.append(
                f'<dt id="word-{key}">{escape(word.name)}</dt><dd>{escape(word.meaning)} '
                f"<small>{_place(word, site)}</small></dd>"
            )
    return f'<dl class="words">{"".join(entries)}</dl>'


def _place(word: Word, site: str | None) -> str:
    """Returns where the documentation tells more: a link if it has a site."""
    name = f"docs/{word.page}.md"
    if site is None:
        return f"More: {name}"
    anchor = f"#{word.heading}" if word.heading else ""
    address = f"{site.rstrip('/')}/{word.page}.html{anchor}"
    return f'More: <a href="{escape(address)}">{name}</a>'


def documentation_site() -> str | None:
    """Returns the address of the documentation that the installed package declares, if any."""
    try:
        metadata = importlib.metadata.metadata("flowgrpo-rc")
    except importlib.metadata.PackageNotFoundError:
        return None
    for entry in metadata.get_all("Project-URL") or ():
        label, _, address = entry.partition(", ")
        if label.lower() == "documentation" and address.startswith("https://"):
            return str(address)
    return None
