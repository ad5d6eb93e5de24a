"""Writes the two reference pages, docs/configuration.md and docs/metrics.md, from the code: `make
reference`.

A key's type and default are those of its dataclass, its meaning stands in that dataclass's
docstring, and what is allowed is what validation answers to a value that nobody would give.
Metrics: `docs/metric_names.py`.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, get_origin, get_type_hints

import torch
from metric_names import SECTIONS, SLIME

from flowgrpo_rc.config.compose import compose_config, to_config
from flowgrpo_rc.config.names import KEYS
from flowgrpo_rc.config.tree import Config
from flowgrpo_rc.spec.check_settings import check_settings
from flowgrpo_rc.spec.resolve import resolve
from flowgrpo_rc.spec.run_spec import Machine

DOCS = Path(__file__).parent
CONFIGURATION = """# Configuration

<!-- Written by `make reference` from the dataclasses; edit their docstrings. -->

Every key with its type, what is allowed, its default and its meaning. A file of `configs/` changes defaults:
`tiny_ocr`, which runs where nothing is said, sets the sizes of the bundled model. `flowgrpo-rc train --cfg job` prints
what a command line makes of all this. An unknown key is an error that names the nearest one, and so is a setting
without effect.

How files, presets and overrides combine is in `configs/README.md`. The options of a reward, `reward.terms.NAME.*`, are
in [Rewards](rewards.md#the-rewards-that-are-there); those of an engine, `rollout.engine_kwargs.*`, in
[vLLM-Omni rollouts](scaling_out.md#options-of-vllm-omni) and [Language models](usage.md#language-models); those of a loss of your own,
`actor.diffusion_loss.*` and `actor.token_loss.*`, in [Adding a loss](extending.md#a-loss).
"""
METRICS = """# Metrics

<!-- Written by `make reference` from docs/metric_names.py. -->

Every name that a run writes to `metrics.jsonl`, to trackers and to the report, one row a step; step 0 holds the first
evaluation. Means, extrema and percentiles are those of the global batch, whatever the number of processes and
micro-batches. A metric without any element to be taken over is absent; a value that is not finite is `null` in the
file.
"""


def configuration() -> str:
    """The page about keys."""
    return "\n".join([CONFIGURATION, *_section(Config(), "")]).rstrip() + "\n"


def metrics() -> str:
    """The page about metrics."""
    parts = [METRICS]
    for section in SECTIONS:
        rows = "\n".join(
            f"|`{metric.name}`|{metric.unit}|{metric.meaning}|" for metric in section.metrics
        )
        parts.append(
            f"## {section.title}\n\n{section.about}\n\n|metric|unit|meaning|\n|---|---|---|\n{rows}\n"
        )
    rows = "\n".join(f"|`{theirs}`|`{ours}`|" for theirs, ours in SLIME)
    about = (
        "With `metric_names=slime` these take the place of the names above, with `both` they stand "
        "beside them."
    )
    parts.append(f"## slime's names\n\n{about}\n\n|slime|here|\n|---|---|\n{rows}\n")
    return "\n".join(parts)


def keys(section: Any, prefix: str) -> Iterator[tuple[str, str]]:
    """Every key below a section, with what its dataclass's docstring says of it."""
    texts = field_texts(type(section))
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            yield from keys(value, f"{prefix}{field.name}.")
        elif field.name != "options":  # no key to write: an option of a loss stands beside it
            yield f"{prefix}{field.name}", texts[field.name]


def field_texts(cls: type) -> dict[str, str]:
    """Field -> its text in the docstring, the lines from `field: ` to the next field or empty
    line.
    """
    names, texts, current = {field.name for field in dataclasses.fields(cls)}, {}, ""
    for line in inspect.cleandoc(cls.__doc__ or "").splitlines():
        name, colon, text = line.partition(": ")
        if colon and name in names:
            current, texts[name] = name, text
        elif line.strip() and current:
            texts[current] += f" {line.strip()}"
        else:
            current = ""
    return texts


def _section(section: Any, prefix: str) -> Iterator[str]:
    """The table of a section's own keys, then those of its parts."""
    parts = {field.name: getattr(section, field.name) for field in dataclasses.fields(section)}
    texts, types = field_texts(type(section)), get_type_hints(type(section))
    if prefix:
        first = inspect.cleandoc(type(section).__doc__ or "").split("\n\n")[0].replace("\n", " ")
        yield f"## {prefix.removesuffix('.')}\n\n{first}\n"
        yield "|key|values|default|meaning|\n|---|---|---|---|"
    for name, value in parts.items():
        if not dataclasses.is_dataclass(value) and name != "options":  # no key to write
            values = "; ".join(
                filter(None, (_type(types[name]), allowed(prefix + name, types[name])))
            )
            cells = (f"`{name}`", values, f"`{_written(value)}`", texts[name])
            yield "|" + "|".join(cell.replace("|", "\\|") for cell in cells) + "|"
    if prefix:
        yield ""
    for name, value in parts.items():
        if dataclasses.is_dataclass(value):
            yield from _section(value, f"{prefix}{name}.")


def allowed(key: str, hint: Any) -> str:
    """What validation says is allowed, when the key is given a value that cannot be meant; "" where
    it does not say.
    """
    if key in _DEPENDS:
        return ""
    *path, name = key.split(".")
    answer = re.compile(rf"{name}[^:]*(?:[:;] allowed are|[:;] give|must be) (.*)")
    for config in _VALID:
        for wrong in _wrong(hint):
            changed = copy.deepcopy(config)
            setattr(reduce(getattr, path, changed), name, wrong)
            try:
                check_settings(resolve(changed, MACHINE))
            except ValueError as error:
                if found := answer.search(str(error)):
                    return found[1]
    return ""


def _wrong(hint: Any) -> Sequence[Any]:
    kind = _type(hint).removesuffix(" or null").partition("[")[0]
    return {
        "int": (-1, 0),
        "float": (-1.0, 0.0, 2.0),
        "list": (["?"],),
        "dict": (),
        "bool": (),
    }.get(kind, ("?",))


def _type(hint: Any) -> str:
    text = hint.__name__ if get_origin(hint) is None and isinstance(hint, type) else str(hint)
    return text.replace("typing.", "").replace(" | None", " or null").replace("Any", "any")


def _written(value: Any) -> str:
    """As YAML has it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_written(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_written, value)) + "]"
    return f"{value:g}" if isinstance(value, float) and value < 1e-3 else str(value) or '""'


# What is allowed follows from other settings; the docstring says how.
_DEPENDS = ("rollout.algo.sde_window_size",)
MACHINE = Machine(torch.device("cpu"))
_VALID = [to_config(compose_config([], config_name=name)) for name in ("tiny_ocr", "token_grpo")]

if __name__ == "__main__":
    (DOCS / "configuration.md").write_text(configuration(), encoding="utf-8")
    (DOCS / "metrics.md").write_text(metrics(), encoding="utf-8")
    KEYS.write_text("".join(f"{key}\n" for key, _ in keys(Config(), "")))
