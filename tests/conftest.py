"""Fixtures of many tests: random checkpoints, prompts, and small runs on them."""

from __future__ import annotations

import gc
import hashlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.runs import SMALL_TEXT, WORDS, Train, Trained, small_run
from support.sharing import make_once, shared_folder

# Fixtures import what is heavy: tests of pure maths start without diffusers and transformers.
if TYPE_CHECKING:
    from support.hub import Hub

    from flowgrpo_rc.models.base import FlowModel, ModelConfig
    from flowgrpo_rc.models.causal_lm import CausalLM
    from flowgrpo_rc.rollout.vllm_omni_engine import VllmOmniEngine

# As a launcher would announce: trainings have one process, whatever trainer.num_processes=auto is.
os.environ.setdefault("WORLD_SIZE", "1")
# A progress bar would stand in the captured output.
os.environ["TQDM_DISABLE"] = "1"
# Each full collection walks over all of torch and diffusers, and small runs make many.
gc.set_threshold(20_000, 10, 20)


COLLECTED = pytest.StashKey[frozenset[str]]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Puts whole runs first: the last tests of several workers should be short ones."""
    config.stash[COLLECTED] = frozenset(item.nodeid for item in items)
    items.sort(key=lambda item: "end_to_end" not in item.path.parts)


@pytest.fixture(scope="session")
def collected(pytestconfig: pytest.Config) -> frozenset[str]:
    """The names of all tests of the session, those among them that a mark leaves out."""
    return pytestconfig.stash[COLLECTED]


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the worker processes of a session share."""
    return shared_folder(tmp_path_factory)


@pytest.fixture(scope="session")
def checkpoint(shared: Path) -> Path:
    """The folder of a StableDiffusion3Pipeline with random weights."""

    def save(folder: Path) -> None:
        import torch
        from support.tiny_models import stable_diffusion_3

        with torch.random.fork_rng():
            torch.manual_seed(0)
            stable_diffusion_3(scaling_factor=1.0, shift_factor=0.0).save_pretrained(folder)

    return make_once(shared / "sd3", save)


@pytest.fixture(scope="session")
def saved(shared: Path) -> Callable[[str], Path]:
    """Returns the folder of a random checkpoint by its name in `tiny_models`; made once."""
    from support.tiny_models import TINY, VARIANTS

    def folder(name: str) -> Path:
        tiny = (TINY | VARIANTS)[name]
        for package in tiny.packages:
            pytest.importorskip(package)
        return make_once(shared / "tiny" / name, tiny.save)

    return folder


@pytest.fixture(scope="session")
def prompt_file(shared: Path) -> Path:
    text = "".join(f'"{word}"\n' for word in WORDS)
    return make_once(shared / "words.txt", lambda path: path.write_text(text))


@pytest.fixture(scope="session")
def loaded(checkpoint: Path) -> FlowModel:
    import torch

    from flowgrpo_rc.models.base import ModelConfig, load_model

    return load_model(ModelConfig(path=str(checkpoint)), torch.device("cpu"))


@pytest.fixture
def model(loaded: FlowModel) -> FlowModel:
    """The random checkpoint as a model whose network a test may change."""
    from support.subjects import with_own_network

    return with_own_network(loaded)


@pytest.fixture(scope="session")
def tiny_lm(shared: Path) -> Path:
    """The folder of a random language model."""
    from support.tiny_language_model import save_language_model

    return make_once(shared / "tiny_lm", save_language_model)


@pytest.fixture
def lm_config(tiny_lm: Path) -> ModelConfig:
    from flowgrpo_rc.models.base import ModelConfig

    return ModelConfig(kind="causal_lm", path=str(tiny_lm), lora_rank=4, lora_alpha=6)


@pytest.fixture
def lm(lm_config: ModelConfig) -> CausalLM:
    import torch

    from flowgrpo_rc.models.causal_lm import load_causal_lm

    return load_causal_lm(lm_config, torch.device("cpu"))


@pytest.fixture
def trained_lm(lm: CausalLM, lm_config: ModelConfig) -> CausalLM:
    """A language model with a LoRA whose B is not zero, so that it takes part."""
    from support.text_rollouts import perturb

    from flowgrpo_rc.models.lora import add_lora

    perturb(add_lora(lm, lm_config, seed=0))
    return lm


@pytest.fixture
def bundled() -> FlowModel:
    """The bundled model, whose layers are wide enough for groups of 32 and tensors of 8 bits."""
    import torch

    from flowgrpo_rc import assets
    from flowgrpo_rc.models.base import ModelConfig, load_model

    return load_model(ModelConfig(path=str(assets.path("tiny_glyph_sd3"))), torch.device("cpu"))


@pytest.fixture
def without_compiler() -> Iterator[None]:
    """Keeps torchao from compiling its optimizer's step, which computes the same either way."""
    import torch

    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], tuple[str, ...]]:
    """Writes the program of a child; returns its command."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # logs of failed children stay

    def write(code: str) -> tuple[str, ...]:
        path = tmp_path / "child.py"
        path.write_text(code)
        return sys.executable, str(path)

    return write


@pytest.fixture
def fake_engine(
    script: Callable[[str], tuple[str, ...]],
    model: FlowModel,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> Callable[..., VllmOmniEngine]:
    """Makes a vLLM-Omni engine with the given options whose child answers by the given code."""
    from support.engine_children import FAKE

    from flowgrpo_rc.models.base import ModelConfig
    from flowgrpo_rc.models.lora import add_lora
    from flowgrpo_rc.rollout import vllm_omni_engine
    from flowgrpo_rc.rollout.vllm_omni_engine import VllmOmniEngine

    (tmp_path / "vllm_omni").mkdir()
    (tmp_path / "vllm_omni" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    network = add_lora(model, ModelConfig(lora_rank=4, lora_alpha=8), seed=0)

    def make(answer: str, **options: Any) -> VllmOmniEngine:
        monkeypatch.setattr(vllm_omni_engine, "COMMAND", script(FAKE.replace("ANSWER", answer)))
        return VllmOmniEngine(model, network, dtype="bf16", chunk_size=2, timeout_s=60, **options)

    return make


@pytest.fixture
def overrides(checkpoint: Path, prompt_file: Path, tmp_path: Path) -> list[str]:
    """Overrides of a run of two small steps.

    There are 4 prompts with 2 samples each, an fp32 rollout and the JPEG reward.
    """
    return small_run(checkpoint, prompt_file, tmp_path / "run")


@pytest.fixture(scope="session")
def trained(checkpoint: Path, prompt_file: Path, shared: Path) -> Trained:
    """Returns the folder of a finished run of `overrides` and further ones, trained once.

    Tests of all workers only read it: a run costs seconds.
    """
    from flowgrpo_rc.cli import main

    def folder(*further: str) -> Path:
        def train(path: Path) -> None:
            assert main(["train", *small_run(checkpoint, prompt_file, path), *further]) == 0

        name = hashlib.sha256(repr(further).encode()).hexdigest()[:16]
        return make_once(shared / "trained" / name, train)

    return folder


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs each test in an empty folder, where no run of a user lies in outputs/."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def _fresh_accelerate() -> Iterator[None]:
    """Resets what accelerate keeps for the whole process: a run has a process of its own."""
    yield
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def hub() -> Iterator[Hub]:
    """A local Hub that takes uploads."""
    from support.hub import local_hub

    with local_hub() as server:
        yield server


@pytest.fixture
def train(overrides: list[str]) -> Train:
    """Runs the training command with `overrides` and further ones; returns the exit code."""
    from flowgrpo_rc.cli import main

    def run(*further: str) -> int:
        return main(["train", *overrides, *further])

    return run


@pytest.fixture
def train_text(tmp_path: Path) -> Train:
    """Runs the training command with `SMALL_TEXT` and further words; returns the exit code."""
    from flowgrpo_rc.cli import main

    def run(*further: str) -> int:
        return main(["train", *SMALL_TEXT, f"trainer.output_dir={tmp_path / 'run'}", *further])

    return run
