"""Writes the tables of plans in docs/memory.md: `make reference`.

Fake tensors take minutes for all models, so what they found is kept in docs/memory.json, with a
digest of what it follows from: the settings, the architecture, and the code that measures. Only
what has another digest is measured again. Tests compare the page with the file, the digests with
the code, and some of the numbers with new measurements.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from flowgrpo_rc.batch import SamplerSpec
from flowgrpo_rc.config.compose import compose_config, config_folder, to_config
from flowgrpo_rc.config.names import RATE
from flowgrpo_rc.config.tree import Config
from flowgrpo_rc.models.architecture import find_architecture
from flowgrpo_rc.planning import activations, fit, operations, phases, weights, work
from flowgrpo_rc.planning.activations import rows_at_once
from flowgrpo_rc.planning.fit import Fitter, Line, measure_needs
from flowgrpo_rc.planning.plan import job_of
from flowgrpo_rc.planning.weights import Job
from flowgrpo_rc.planning.work import passes
from flowgrpo_rc.records.run_folder import flat_settings
from flowgrpo_rc.spec.check_folder import disk_bytes
from flowgrpo_rc.spec.resolve import resolve
from flowgrpo_rc.spec.run_spec import Machine, RunSpec

DOCS = Path(__file__).parent
PAGE = DOCS / "memory.md"
STORE = DOCS / "memory.json"
END = "<!-- end of what is written -->\n"
GIB = 2**30
ARCHITECTURES = config_folder() / "architectures"
EXPERIMENTS = sorted(path.stem for path in (config_folder() / "experiment").glob("*.yaml"))
CARDS = (12, 16, 24, 48, 80)
PROCESSES = (1, 8)
# GiB of a card, by the end of an experiment's name.
CARD_GIB = {"h100": 80, "h800": 80, "h200": 141}

_ONE_CARD = ("data.train_batch_size=8", "rollout.n=8", "actor.ppo_mini_batch_size=4")
_SMALL = (*_ONE_CARD, "actor.ppo_micro_batch_size_per_gpu=8")
_OWN_ENGINE = (
    "rollout.name=diffusers_engine",
    "~rollout.engine_kwargs.sleep",
    "trainer.strategy=ddp",
)
# Model -> overrides of its job on one card, and on eight.
JOBS = {
    "SD3.5-medium": (
        ("+experiment=sd35_medium_ocr_1xh100",),
        ("+experiment=sd35_medium_ocr_8xh100",),
    ),
    "FLUX.1-dev": (
        ("+experiment=flux1_dev_ocr_8xh100", *_SMALL),
        ("+experiment=flux1_dev_ocr_8xh100",),
    ),
    "Qwen-Image": (
        ("+experiment=qwen_image_ocr_rollout_corr_4xh800", *_OWN_ENGINE, *_SMALL),
        ("+experiment=qwen_image_ocr_rollout_corr_4xh800", *_OWN_ENGINE),
    ),
    "Wan 2.1 1.3B": (
        ("+experiment=wan21_t2v_1_3b_ocr_8xh100", *_SMALL),
        ("+experiment=wan21_t2v_1_3b_ocr_8xh100",),
    ),
}
# Model and what its frozen weights are -> overrides of its job on one small card.
_AT_HOME = (*_SMALL, "rollout.val_kwargs.batch_size=2")
AT_HOME = {
    "Sana 600M": ("+experiment=sana_600m_ocr_1xh100",),
    "SD3.5-medium, nf4": ("+experiment=sd35_medium_ocr_1xh100", "model.quantization=nf4"),
    "Z-Image Turbo, nf4": ("+experiment=z_image_turbo_ocr_8xh100", "model.quantization=nf4"),
    "FLUX.1-dev, nf4": ("+experiment=flux1_dev_ocr_8xh100", "model.quantization=nf4"),
}
# Files and logins that a plan does not need.
_ELSEWHERE = ("data.train_files=any", "data.val_files=any", "trainer.logger=[console]")
_SOURCES = (activations, fit, operations, phases, weights, work)

_BUILT: dict[str, Job] = {}


class Composed:
    """Settings on a number of cards, and what follows from them without measuring."""

    def __init__(self, *overrides: str, processes: int) -> None:
        """Composes the settings."""
        composed = compose_config([*overrides, *_ELSEWHERE])
        self.processes = processes
        self.spec = resolve(to_config(composed), Machine(torch.device("cuda"), processes))
        self.config: Config = self.spec.config

    @functools.cached_property
    def planned(self) -> Job:
        """Returns the run to plan, with the model's folder and a model without weights.

        Jobs with equal forwards share a model, which takes seconds to build.
        """
        if self.needs_digest not in _BUILT:
            _BUILT[self.needs_digest] = job_of(self.spec)
        first = _BUILT[self.needs_digest]
        model = replace(self.config.model, path=first.config.model.path)
        return replace(first, spec=self.spec.with_sections(model=model))

    @functools.cached_property
    def needs_digest(self) -> str:
        """Returns the digest of what the activations of some samples follow from."""
        model = self.config.model
        folder = find_architecture(self.config.model.path, ARCHITECTURES)
        assert folder is not None, self.config.model.path
        files = [path.read_bytes() for path in sorted(folder.rglob("*.json"))]
        settings = (
            *(model.dtype, model.lora_rank, model.target_modules),
            *([model.quantization] if model.quantization else []),
            _shape(self.config.rollout.spec()),
            _shape(self.config.rollout.held_out_spec()),
            self.config.trainer.mixed_precision,
            rows_at_once(self.spec) // self.config.actor.ppo_micro_batch_size_per_gpu,
        )
        return _digest(repr(settings).encode(), inspect.getsource(activations).encode(), *files)

    @functools.cached_property
    def work_digest(self) -> str:
        """Returns the digest of what the operations of each part of a step follow from."""
        model, rollout = self.config.model, self.config.rollout
        settings = (
            *sorted({kind for *_, kind in passes(self.planned)}),
            *(model.gradient_checkpointing, rollout.merge_lora, rollout.cache),
            rollout.held_out_spec().num_inference_steps,
        )
        code = inspect.getsource(operations).encode()
        return _digest(self.needs_digest.encode(), repr(settings).encode(), code)

    @functools.cached_property
    def digest(self) -> str:
        """Returns the digest of what the plan follows from."""
        code = [inspect.getsource(module).encode() for module in _SOURCES]
        settings = repr(_given(asdict(self.config))).encode()
        return _digest(self.needs_digest.encode(), settings, str(self.processes).encode(), *code)


def experiment(name: str) -> Composed:
    """Returns the job of a shipped experiment on the cards of its name."""
    return Composed(f"+experiment={name}", processes=int(cards_of(name)[0]))


def cards_of(name: str) -> tuple[str, str]:
    """Returns number and kind of the cards in an experiment's name."""
    found = re.search(r"_(\d+)x(h\d00)$", name)
    assert found is not None, name
    return found[1], found[2]


def needs_of(job: Composed, store: Any) -> dict[str, Line]:
    """Returns the activations of a job, measured if the store does not have them."""
    kept = store["needs"].get(job.needs_digest)
    if kept is None:
        kept = {phase: asdict(line) for phase, line in measure_needs(job.planned).items()}
        store["needs"][job.needs_digest] = kept
    return {phase: Line(**line) for phase, line in kept.items()}


def work_of(job: Composed, store: Any) -> int:
    """Returns the operations of a step; those of each kind are counted if the store has none."""
    kept = store["work"].get(job.work_digest)
    if kept is None:
        kept = operations.operations(job.planned)
        store["work"][job.work_digest] = kept
    return sum(number * kept[kind] for _, number, _, kind in passes(job.planned))


def plan_row(name: str, store: Any) -> dict[str, Any]:
    """Returns the plan of an experiment, and what --fit says of its settings."""
    job = experiment(name)
    run = job.planned
    needs = needs_of(job, store)
    besides = phases.phases(run, fit.activations_of(needs, run.spec))
    fitter = Fitter(run, needs=needs)
    return {
        "digest": job.digest,
        "held": sum(size for _, size, _ in weights.memory(run)),
        "phases": {phase: size for phase, size, _ in besides},
        "peak": fitter.peak(run.spec),
        "host": max(size for _, size, _ in weights.on_the_host(run)),
        "disk": disk_bytes(run.config, run.trained),
        "flop": work_of(job, store),
        "shipped": settings_of(run.spec),
        "proposed": settings_of(fitter.fit(CARD_GIB[cards_of(name)[1]]).spec),
    }


def settings_of(run: RunSpec) -> dict[str, Any]:
    """Returns the settings of memory, as they work."""
    config, chunk = run.config, run.chunk_size
    return {
        "gradient_checkpointing": config.model.gradient_checkpointing,
        "offload_idle": config.model.offload_idle,
        "decoded": min(config.model.decode_batch_size or chunk, chunk),
        "sampled": chunk,
        "micro": config.actor.ppo_micro_batch_size_per_gpu,
    }


def card_row(job: Composed, store: Any) -> dict[str, Any]:
    """Returns what --fit proposes for a job on each size of card."""
    fitter = Fitter(job.planned, needs=needs_of(job, store))
    found = {}
    for gib in CARDS:
        proposal = fitter.fit(gib)
        settings = settings_of(proposal.spec)
        found[str(gib)] = {"fits": proposal.fits, "peak": proposal.peak, **settings}
    return {"digest": job.digest, "cards": found}


def updated(store: Any) -> Any:
    """Returns the store with what follows from the present settings and code."""
    new: dict[str, Any] = {
        **{name: dict(store.get(name, {})) for name in ("needs", "work")},
        **{name: {} for name in ("experiments", "cards")},
    }
    for name in EXPERIMENTS:
        kept = store["experiments"].get(name)
        current = kept is not None and kept["digest"] == experiment(name).digest
        new["experiments"][name] = kept if current else plan_row(name, new)
    for key, job in jobs():
        kept = store["cards"].get(key)
        current = kept is not None and kept["digest"] == job.digest
        new["cards"][key] = kept if current else card_row(job, new)
    used = {experiment(name).needs_digest for name in EXPERIMENTS}
    used |= {job.needs_digest for _, job in jobs()}
    used |= {experiment(name).work_digest for name in EXPERIMENTS}
    for name in ("needs", "work"):
        new[name] = {key: found for key, found in sorted(new[name].items()) if key in used}
    return new


def jobs() -> Iterator[tuple[str, Composed]]:
    """Yields the jobs of the table of cards."""
    for model, overrides in JOBS.items():
        for processes, words in zip(PROCESSES, overrides, strict=True):
            yield f"{model}, {processes}", Composed(*words, processes=processes)
    for model, words in AT_HOME.items():
        yield f"{model}, 1", Composed(*words, *_AT_HOME, processes=1)


def page(store: Any) -> str:
    """Returns docs/memory.md with its tables as the store has them."""
    text = PAGE.read_text(encoding="utf-8")
    tables: dict[str, Callable[[Any], Iterable[str]]] = {"experiments": experiments, "cards": cards}
    for name, rows in tables.items():
        start = f"<!-- Written by `make reference`: {name}. -->\n"
        before, found, rest = text.partition(start)
        assert found, f"{PAGE.name} has no {start!r}"
        _, _, after = rest.partition(END)
        text = f"{before}{start}\n{''.join(rows(store))}\n{END}{after}"
    return text


def experiments(store: Any) -> Iterator[str]:
    """Yields the rows of the shipped experiments, in GiB."""
    shown = ("update", "rollout", "decoding", "evaluation")
    yield f"| experiment | always | {' | '.join(shown)} | peak | of | host | disk | seconds |\n"
    yield f"|---|{'---|' * (len(shown) + 6)}\n"
    for name, row in store["experiments"].items():
        besides = row["phases"]
        largest = max(besides, key=besides.get)
        told = " | ".join(_gib(besides[phase]) for phase in shown)
        yield (
            f"| `{name}` | {_gib(row['held'])} | {told} | {_gib(row['peak'])} in {largest} "
            f"| {CARD_GIB[cards_of(name)[1]]} | {_gib(row['host'])} | {_gib(row['disk'])} "
            f"| {row['flop'] / RATE / 1e12:,.0f} |\n"
        )


def cards(store: Any) -> Iterator[str]:
    """Yields the rows of models on cards, in GiB."""
    yield f"| model, cards | {' | '.join(f'{gib} GB' for gib in CARDS)} |\n"
    yield f"|---|{'---|' * len(CARDS)}\n"
    for key, row in store["cards"].items():
        yield f"| {key} | {' | '.join(_cell(row['cards'][str(gib)]) for gib in CARDS)} |\n"


def _cell(found: Any) -> str:
    if not found["fits"]:
        return f"no: {_gib(found['peak'])}"
    offload = "layers" if found["offload_idle"] == "layers" else "offload"
    extras = [
        word
        for key, word in (("gradient_checkpointing", "checkpointing"), ("offload_idle", offload))
        if found[key]
    ]
    sizes = f"{found['micro']} / {found['sampled']} / {found['decoded']}"
    return ", ".join([f"{_gib(found['peak'])}: {sizes}", *extras])


def _shape(spec: SamplerSpec) -> tuple[Any, ...]:
    """Returns what the sizes of activations follow from; guidance may take a second row."""
    scales = (spec.guidance_scale, spec.true_cfg_scale or 0.0)
    guided = [(scale > 0, scale > 1) for scale in scales]
    size = (spec.height, spec.width, spec.num_frames, spec.max_sequence_length)
    return (*size, spec.dtype, *guided)


def _given(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings by their whole names, without those that say nothing.

    A key that is new, and off by default, thus changes no digest.
    """
    flat = flat_settings(settings)
    return {key: value for key, value in flat.items() if value is not None and value is not False}


def _gib(number: int) -> str:
    return f"{number / GIB:.1f}"


def _digest(*contents: bytes) -> str:
    whole = hashlib.sha256()
    for content in contents:
        whole.update(hashlib.sha256(content).digest())
    return whole.hexdigest()[:16]


if __name__ == "__main__":
    stored = json.loads(STORE.read_text()) if STORE.is_file() else {}
    stored = updated({"experiments": {}, "cards": {}} | stored)
    STORE.write_text(json.dumps(stored, indent=1) + "\n")
    PAGE.write_text(page(stored), encoding="utf-8")
