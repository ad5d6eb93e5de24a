"""Trains Stable Diffusion 3.5 medium at its published size on a CPU, with random weights.

    python examples/benchmarks/full_size.py [--folder FOLDER] [overrides]

No weights are needed: the networks are built from `configs/architectures` and saved as a checkpoint
without T5, some 7 GB. Then the commands of a user run, each in a process of its own: two prompts of
two images at 256 x 256 with four denoising steps are sampled, decoded, scored and trained on for a
step; the run is stopped, goes on from its checkpoint for another step, and leaves a LoRA. Seconds
and memory of each are printed, beside what `plan` says. The images show nothing.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from flowgrpo_rc import assets

ARCHITECTURE = "stable-diffusion-3.5-medium"
NETWORKS = ("transformer", "vae", "text_encoder", "text_encoder_2")
SETTINGS = (
    "+experiment=sd35_medium_signs_1xh100",
    "data.train_batch_size=2",
    "rollout.n=2",
    "rollout.micro_batch_size_per_gpu=2",
    "rollout.pipeline.height=256",
    "rollout.pipeline.width=256",
    "rollout.pipeline.num_inference_steps=4",
    "rollout.pipeline.max_sequence_length=16",
    "rollout.algo.sde_window_size=1",
    "rollout.algo.sde_window_range=[0,2]",
    "actor.ppo_mini_batch_size=2",
    "actor.ppo_micro_batch_size_per_gpu=2",
    "actor.use_kl_loss=false",
    "actor.ema.update_interval=1",
    "actor.optim.lr_scheduler=constant",
    "reward.terms.ocr=null",
    "reward.terms.jpeg.weight=1.0",
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
    "trainer.device=cpu",
)


def build(folder: Path) -> None:
    """Writes a checkpoint of the published size with random weights."""
    from flowgrpo_rc.config.compose import config_folder
    from flowgrpo_rc.models.architecture import unpack_architecture

    architecture = unpack_architecture(config_folder() / "architectures" / f"{ARCHITECTURE}.json")
    index = json.loads((architecture / "model_index.json").read_text())
    index |= {"text_encoder_3": [None, None], "tokenizer_3": [None, None]}
    folder.mkdir(parents=True)
    for name in NETWORKS:
        network = _network(architecture, name, *index[name])
        network.save_pretrained(folder / name)
        del network
    for name in ("tokenizer", "tokenizer_2"):
        shutil.copytree(assets.path("tiny_glyph_sd3") / name, folder / name)
    shutil.copytree(architecture / "scheduler", folder / "scheduler")
    (folder / "model_index.json").write_text(json.dumps(index))


def _network(architecture: Path, name: str, library: str, class_name: str) -> Any:
    """Returns a network with the weights that its class draws, in bf16, the VAE in fp32."""
    import torch

    cls = getattr(importlib.import_module(library), class_name)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32 if name == "vae" else torch.bfloat16)
    try:
        if library == "transformers":
            return cls(cls.config_class.from_pretrained(str(architecture), subfolder=name))
        return cls.from_config(cls.load_config(str(architecture), subfolder=name))
    finally:
        torch.set_default_dtype(torch.float32)


class Measured:
    """Runs a command; tells its seconds, its largest memory and its exit code."""

    def __init__(self, command: list[str]) -> None:
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        usage: dict[str, Any] = {}

        def wait() -> None:
            _, status, found = os.wait4(process.pid, 0)
            usage["code"], usage["memory"] = os.waitstatus_to_exitcode(status), found.ru_maxrss

        waiting = threading.Thread(target=wait)
        waiting.start()
        assert process.stdout is not None
        self.output = process.stdout.read()
        waiting.join()
        self.seconds = time.perf_counter() - start
        self.code: int = usage["code"]
        self.bytes: int = usage["memory"] * 1024

    def __str__(self) -> str:
        return f"{self.seconds:.0f} s, at most {in_gib(self.bytes)}"


def in_gib(number: int) -> str:
    return f"{number / 2**30:.2f} GiB"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", help="where the checkpoint and the run are kept")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    if arguments.folder is not None:
        train(Path(arguments.folder), arguments.overrides)
        return
    with tempfile.TemporaryDirectory() as folder:
        train(Path(folder), arguments.overrides)


def train(folder: Path, overrides: list[str]) -> None:
    """Builds the checkpoint if it is not there, trains on it, and checks what is left."""
    model, run = folder / "model", folder / "run"
    if not model.is_dir():
        built = Measured([sys.executable, __file__, "--build", str(model)])
        assert built.code == 0
        size = sum(file.stat().st_size for file in model.rglob("*.safetensors"))
        print(f"a checkpoint of {in_gib(size)}: {built}", flush=True)
    settings = [*SETTINGS, f"model.path={model}", f"trainer.output_dir={run}", *overrides]
    module = [sys.executable, "-m", "flowgrpo_rc"]
    planned = Measured([*module, "plan", *settings])
    assert planned.code == 0
    print(planned.output[planned.output.index("memory of") :], flush=True)
    expected = planned_gib(planned.output, "peak") - planned_gib(planned.output, CONTEXT)
    stopped = [*settings, "trainer.total_training_steps=2", "trainer.max_time=1"]
    for what, code, command in (
        ("a step", 75, stopped),
        ("resumed for another", 0, [*settings, "trainer.total_training_steps=2"]),
    ):
        done = Measured([*module, "train", *command])
        assert done.code == code, done.code
        row = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
        phases = ", ".join(f"{name} {row[f'timing_s/{name}']:.0f} s" for name in PHASES)
        print(f"{what}: {done}; {phases}; loss {row['actor/pg_loss']:.2e}", flush=True)
        print(
            f"  planned: {expected:.2f} GiB of weights, states and activations; the rest is Python "
            "and its libraries, and what loading leaves",
            flush=True,
        )
        assert math.isfinite(row["actor/grad_norm"])
        assert row["actor/grad_norm"] > 0
    lora = run / "lora" / "pytorch_lora_weights.safetensors"
    print(f"a LoRA of {in_gib(lora.stat().st_size)}: {lora.name}", flush=True)


def planned_gib(plan: str, name: str) -> float:
    """Returns a size that a plan tells, in GiB."""
    found = re.search(rf"^  {name} +([\d.]+) (GiB|MiB)", plan, re.MULTILINE)
    assert found is not None, name
    return float(found[1]) / (1 if found[2] == "GiB" else 1024)


PHASES = ("rollout", "update", "step")
CONTEXT = "CUDA and libraries"

if __name__ == "__main__":
    if sys.argv[1:2] == ["--build"]:
        build(Path(sys.argv[2]))
    else:
        main()
