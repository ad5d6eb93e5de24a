"""Runs a training script of flow_grpo's checkout on the bundled job, for the time to reward.

    python examples/benchmarks/time_to_reward_peer.py [--set key=value] CHECKOUT SCRIPT [overrides]

The overrides change the bundled job, configs/tiny_ocr.yaml, whose model, words, batch, sampler and
optimizer settings go into the script's own configuration. Its loop, sampler, log-probs, loss,
advantages and optimizer are its own, and no file of the checkout is changed. What is put in from
outside:

* Empty stand-ins for wandb, absl and ml_collections. Nothing is logged.
* The configuration: config/base.py of the checkout with the settings of the job. Everything is
  fp32, without guidance, with a clip of 1e-3, and `--set` changes further keys.
* The words of the job as the script's data set. The seed of its prompt sampler is that of the run;
  in the script it is always 42.
* Height and width of the sampler, which are one number in the script, and the lengths of the tiny
  tokenizers, which are fixed there for large ones.
* The reward: the OCR of this package in place of PaddleOCR. It runs in the script's own threads.
* Rank and alpha of the LoRA, decay and interval of its average: fixed numbers in the script, here
  those of the job, because the averages are compared.
* The script's evaluation, which is called before every iteration: it becomes a line of
  FOLDER/metrics.jsonl and, every `trainer.save_freq` iterations, a snapshot of the averaged LoRA in
  FOLDER/checkpoints. After the last iteration it ends the script.
* The network gets the attribute `module`, which the KL of the script reads: it expects the wrapper
  that several processes put around it.

Under torchrun each process takes its share of a sampling batch, as on several GPUs, and the first
one leaves the lines and snapshots. There is no CUDA, and these scripts do not use torch.compile.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import os
import shutil
import sys
import time
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flowgrpo_rc.config.compose import compose_config, to_config
from flowgrpo_rc.config.tree import Config
from flowgrpo_rc.models.base import to_uint8
from flowgrpo_rc.models.lora_files import ADAPTER
from flowgrpo_rc.records.checkpoint import Checkpoint, save_checkpoint
from flowgrpo_rc.rewards.ocr import OCR
from flowgrpo_rc.spec.check_inputs import prompts_of
from flowgrpo_rc.spec.machine import machine_of_process
from flowgrpo_rc.spec.resolve import resolve

NEVER = 10**9
CLIP = 1e-3  # the band of the bundled job follows the mismatch, and the scripts take a number
PEFT_PREFIX = "base_model.model."
SECONDS_TO_READ = 0.5  # for the last reading of the clocks, before this program ends
# As torchrun sets them.
RANK = int(os.environ.get("RANK", "0"))
PROCESSES = int(os.environ.get("WORLD_SIZE", "1"))


class Finished(Exception):
    """The script has done its iterations."""


class Empty(types.ModuleType):
    """A module in which every name is an empty module that can be called and does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Empty(name)

    def __call__(self, *arguments: object, **options: object) -> None:
        return None


class Settings(dict):
    """A dictionary whose keys are attributes, as the script's configuration has them."""

    def __getattr__(self, name: str) -> Any:
        return self[name]

    __setattr__ = dict.__setitem__


class Iterations:
    """Takes the place of the script's evaluation, which is called before every iteration."""

    def __init__(self, folder: Path, config: Config) -> None:
        """Starts before the first iteration, in a new folder."""
        self._folder = folder
        self._config = config
        self._step = 0

    def __call__(self, pipeline: Any, *others: Any) -> None:
        """Notes that an iteration has ended; raises Finished after the last."""
        trainer = self._config.trainer
        last = self._step == trainer.total_training_steps
        if RANK == 0:
            with open(self._folder / "metrics.jsonl", "a") as file:
                file.write(json.dumps({"step": self._step}) + "\n")
            if self._step and (last or self._step % trainer.save_freq == 0):
                self._save(pipeline.transformer, others[-2])
        if last:
            time.sleep(SECONDS_TO_READ)
            raise Finished
        self._step += 1

    def _save(self, transformer: Any, ema: Any) -> None:
        names = [name for name, one in transformer.named_parameters() if one.requires_grad]
        weights = {
            name.removeprefix(PEFT_PREFIX): tensor
            for name, tensor in zip(names, ema.ema_parameters, strict=True)
        }
        found = Checkpoint(step=self._step, tensors={"lora": weights}, state={})
        save_checkpoint(self._folder / "checkpoints", found, keep=NEVER)


def load(path: Path, name: str) -> types.ModuleType:
    """Imports a file as a module."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def settings(base: Settings, config: Config, folder: Path) -> Settings:
    """Puts the bundled job into the script's configuration.

    Args:
      base: the script's defaults; changed.
      config: the job.
      folder: for the words, and for what the script writes.

    Returns:
      The configuration.
    """
    pipeline, algo = config.rollout.pipeline, config.rollout.algo
    optim = config.actor.optim
    batch = config.actor.ppo_mini_batch_size * config.rollout.n // PROCESSES
    size, first, last = config.rollout.window()
    base.update(
        seed=config.trainer.seed,
        mixed_precision="no",
        dataset=str(folder),
        logdir=str(folder / "logs"),
        save_dir=str(folder / "logs"),
        save_freq=NEVER,
        eval_freq=1,
        resolution=pipeline.height,
        prompt_fn="general_ocr",
        reward_fn={"ocr": 1.0},
    )
    base.pretrained.model = config.model.path
    base.sample.update(
        num_steps=pipeline.num_inference_steps,
        guidance_scale=pipeline.guidance_scale,
        train_batch_size=batch,
        num_image_per_prompt=config.rollout.n,
        num_batches_per_epoch=config.data.train_batch_size // config.actor.ppo_mini_batch_size,
        noise_level=algo.noise_level,
        sde_type=algo.sde_type,
        sde_window_size=size,
        sde_window_range=(first, last),
    )
    base.train.update(
        batch_size=batch,
        cfg=False,
        learning_rate=optim.lr,
        adam_beta1=optim.betas[0],
        adam_beta2=optim.betas[1],
        adam_weight_decay=optim.weight_decay,
        adam_epsilon=1e-8,
        max_grad_norm=optim.clip_grad,
        adv_clip_max=config.actor.diffusion_loss.adv_clip_max,
        clip_range=CLIP,
        timestep_fraction=0.99,
        ema=True,
    )
    return base


def change(configuration: Settings, given: Sequence[str]) -> None:
    """Sets `section.key=value` in the script's configuration."""
    for one in given:
        name, _, value = one.partition("=")
        *sections, key = name.split(".")
        place = configuration
        for section in sections:
            place = place[section]
        place[key] = ast.literal_eval(value)


def scorer(config: Config) -> Any:
    """Makes what the script calls as its reward: images [N, 3, H, W] and their texts."""
    spec = resolve(config, machine_of_process(config))
    prompts = {prompt.text: prompt for prompt in prompts_of(spec).sampler.prompts}
    ocr = OCR()
    # The first image loads the model, which is no part of an iteration: a run of this package loads
    # it for the evaluation before training.
    ocr.read(
        np.zeros((1, config.rollout.pipeline.height, config.rollout.pipeline.width, 3), np.uint8)
    )

    def score(images: Any, texts: Sequence[str], *_: Any, **__: Any) -> tuple[dict, dict]:
        pictures = to_uint8(images)
        values = ocr(pictures, [prompts[text] for text in texts]).values
        return {"ocr": values, "avg": values}, {}

    return score


def patch(script: Any, config: Config, folder: Path) -> None:
    """Puts in what the module's docstring lists."""
    import flow_grpo.rewards  # of the checkout

    pipeline, ema = config.rollout.pipeline, config.actor.ema
    sample, encode = script.pipeline_with_logprob, script.encode_prompt
    sampler, add_lora = script.DistributedKRepeatSampler, script.get_peft_model
    lora, average = script.LoraConfig, script.EMAModuleWrapper

    def encoded(encoders: Any, tokenizers: Any, texts: Any, _: int) -> Any:
        short = [limited(tokenizer) for tokenizer in tokenizers]
        return encode(encoders, short, texts, pipeline.max_sequence_length)

    def network(*arguments: Any) -> Any:
        found = add_lora(*arguments, adapter_name=ADAPTER)
        # Past nn.Module, to which a network inside itself would be a cycle.
        object.__setattr__(found, "module", found)
        return found

    size = {"height": pipeline.height, "width": pipeline.width}
    script.pipeline_with_logprob = lambda *a, **k: sample(*a, **(k | size))
    script.encode_prompt = encoded
    script.DistributedKRepeatSampler = lambda **k: sampler(**(k | {"seed": config.trainer.seed}))
    script.LoraConfig = lambda **k: lora(
        **(k | {"r": config.model.lora_rank, "lora_alpha": config.model.lora_alpha})
    )
    script.get_peft_model = network
    script.EMAModuleWrapper = lambda parameters, device, **_: average(
        parameters, decay=ema.decay, update_step_interval=ema.update_interval, device=device
    )
    flow_grpo.rewards.multi_score = lambda *_: scorer(config)
    script.eval = Iterations(folder, config)


def limited(tokenizer: Any) -> Any:
    """Returns a tokenizer that pads and cuts at its own limit, if that is below what is asked."""

    def tokenize(texts: Any, *, max_length: int, **options: Any) -> Any:
        return tokenizer(texts, max_length=min(max_length, tokenizer.model_max_length), **options)

    return tokenize


def main() -> None:
    """Parses the command line and runs the script to the last iteration of the job."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path)
    parser.add_argument("script")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_args()
    config = to_config(compose_config(given.overrides))
    output = Path(config.trainer.output_dir).resolve()
    folder = output / f"process_{RANK}"  # for what each process writes on its own
    folder.mkdir(parents=True)
    for split, files in (("train", config.data.train_files), ("test", config.data.val_files)):
        (file,) = [files] if isinstance(files, str) else files
        shutil.copy(file, folder / f"{split}.txt")
    for name in ("wandb", "absl", "ml_collections"):
        sys.modules[name] = Empty(name)
    sys.modules["ml_collections"].ConfigDict = Settings  # type: ignore[attr-defined]
    sys.path.insert(0, str(given.checkout))
    base = load(given.checkout / "config" / "base.py", "peer_base").get_config()
    configuration = settings(base, config, folder)
    change(configuration, given.set)
    script: Any = load(given.checkout / given.script, "peer_script")
    script.FLAGS = types.SimpleNamespace(config=configuration)
    patch(script, config, output)
    try:
        script.main([])
    except Finished:
        return
    raise RuntimeError(f"{given.script} ended before its last iteration")


if __name__ == "__main__":
    main()
